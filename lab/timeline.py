"""Timeline of a pipeline's step: records when each process computes, and draws it."""

import contextlib
import functools
import time
from unittest.mock import patch

from nanoladder import files

KINDS = {  # of computation: label, color
    "forward": ("forward", "#56b4e9"),
    "backward": ("backward", "#009e73"),
    "input": ("backward, inputs' gradients", "#e69f00"),
    "weight": ("backward, weights' gradients", "#cc79a7"),
}


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
