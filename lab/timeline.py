"""Timeline of a pipeline's step: records when each process computes, and draws it."""

import contextlib
import functools
import itertools
import time
from unittest.mock import patch

from lab.pictures import subplots
from nanoladder import files, parallel

KINDS = {  # of computation: label, colors of a process's first and second stage
    "forward": ("forward", ("#9ecae1", "#559fd1")),
    "backward": ("backward", ("#a1d99b", "#52b36b")),
    "input": ("backward: gradients of activations", ("#fee391", "#f2b632")),
    "weight": ("backward: gradients of weights", ("#d4c6e8", "#a583cf")),
}
IDLE = "#ececec"
IDLE_BY_FORMULA = {  # schedule: formula in processes p, micro-batches m and stages of a process v = 2
    "1f1b": "(p - 1) / (m + p - 1)",
    "interleaved": "(p - 1) / (v m + p - 1)",
    "zero_bubble": "(p - 1) / (3 v m + p - 1)",
}
NARROW = 0.012  # of the width: a box without a number


@contextlib.contextmanager
def recorded():
    """Records what pipeline stages compute inside the `with` block, in [kind, stage, micro-batch, start, end] (s)."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    boxes = []

    def timed(function, kind_of):
        @functools.wraps(function)
        def call(stage, number, *args, **kwargs):
            start = time.perf_counter()  # the same clock in all processes of a machine
            result = function(stage, number, *args, **kwargs)
            boxes.append([kind_of(kwargs), stage.stage_index, number, start, time.perf_counter()])
            return result

        return call

    def with_loss(function):  # the loss belongs to the last stage's forward, which has just ended
        @functools.wraps(function)
        def call(*args, **kwargs):
            function(*args, **kwargs)
            boxes[-1][-1] = time.perf_counter()

        return call

    def backward(keywords):
        return "backward" if keywords.get("full_backward", True) else "input"

    stage = _PipelineStageBase
    with (
        patch.object(stage, "forward_one_chunk", timed(stage.forward_one_chunk, lambda _: "forward")),
        patch.object(stage, "backward_one_chunk", timed(stage.backward_one_chunk, backward)),
        patch.object(stage, "backward_weight_one_chunk", timed(stage.backward_weight_one_chunk, lambda _: "weight")),
        patch.object(_PipelineSchedule, "_maybe_compute_loss", with_loss(_PipelineSchedule._maybe_compute_loss)),
    ):
        yield boxes


def idle_share(processes):
    """Share of a step in which processes do not compute, 0 to 1. processes: for each, its boxes, as of recorded()."""
    busy = sum(box[4] - box[3] for boxes in processes for box in boxes)
    return 1 - busy / (len(processes) * seconds(processes))


def seconds(processes):
    """Time from the first start of a step's boxes to their last end."""
    boxes = list(itertools.chain(*processes))
    return max(box[4] for box in boxes) - min(box[3] for box in boxes)


def caption(schedule, micro_batches, processes):
    """1f1b, 8 micro-batches: 30% idle, (p - 1) / (m + p - 1) = 27%"""
    formula = parallel.predict_bubble(schedule, len(processes), micro_batches)
    return (
        f"{schedule}, {micro_batches} micro-batches: {idle_share(processes):.0%} idle, "
        f"{IDLE_BY_FORMULA[schedule]} = {formula:.0%}"
    )


def draw(pipelines, path):
    """Draws pipelines to a PNG, one above the other on one scale. pipelines: caption()'s arguments of each."""
    panels = {caption(**pipeline): pipeline["processes"] for pipeline in pipelines}
    heights = [len(processes) for processes in panels.values()]
    figure, axes = subplots(
        len(panels),
        figsize=(13, 1 + sum(0.42 * height + 0.75 for height in heights)),
        sharex=True,
        squeeze=False,
        height_ratios=[height + 0.6 for height in heights],
    )
    axes, width = axes[:, 0], max(map(seconds, panels.values()))
    for axis, (title, processes) in zip(axes, panels.items(), strict=True):
        axis.axvspan(0, 1e3 * seconds(processes), color=IDLE, zorder=0)
        begin = min(box[3] for box in itertools.chain(*processes))
        for row, boxes in enumerate(processes):
            draw_process(axis, row, boxes, begin, NARROW * width)
        axis.set_title(title, loc="left", fontsize="medium", fontweight="bold")
        axis.set_yticks(range(len(processes)), [f"process {row}" for row in range(len(processes))])
        axis.set_ylim(len(processes) - 0.5, -0.5)
        axis.tick_params(left=False, bottom=axis is axes[-1])
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes[-1].set(xlabel="ms", xlim=(0, 1e3 * width))
    legend(figure, panels)
    files.write(path, lambda file: figure.savefig(file, dpi=130, format="png"))


def draw_process(axis, row, boxes, begin, narrow):
    """Draws the boxes of a process, with the number of the micro-batch in each that is not too narrow (s)."""
    first = min(box[1] for box in boxes)  # its first stage
    for kind, stage, number, start, end in boxes:
        color = KINDS[kind][1][stage > first]
        left, width = 1e3 * (start - begin), 1e3 * (end - start)
        axis.barh(row, width, left=left, height=0.84, color=color, edgecolor="white", linewidth=0.6)
        if end - start > narrow:
            axis.text(left + width / 2, row, number + 1, ha="center", va="center", fontsize=8)


def legend(figure, panels):
    """Adds a legend of the kinds that occur, the darker color for a process's second stage."""
    from matplotlib.patches import Patch

    boxes = [box for processes in panels.values() for found in processes for box in found]
    kinds = [kind for kind in KINDS if kind in {box[0] for box in boxes}]
    handles = [Patch(color=KINDS[kind][1][0], label=KINDS[kind][0]) for kind in kinds]
    handles.append(Patch(color=IDLE, label="idle"))
    if any(len({box[1] for box in found}) > 1 for processes in panels.values() for found in processes):
        handles.append(Patch(color="#559fd1", label="darker: the process's second stage"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize="small")
