"""Measures what each stage of the ladder is worth on this machine: python profile.py config/x.py [options]

Every figure comes from train.py's own train_step on real batches, in a process of its own, one process at a time.
A stage's first process trains on the batches that naive trained on, keeps the losses and counts the bytes of all
tensors; the others time it. They take turns, stage after stage, so that a drift of the machine hits all alike.
"""

import argparse
import contextlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

# The standard library has a module of this name, which torch imports by way of cProfile: whoever imports `profile`
# from this folder gets that one. torch is imported where it is used, so that the two never wait for each other.
if __name__ == "profile":
    spec = importlib.util.spec_from_file_location("profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["profile"])

WARMUP = 2  # steps before the clock starts: the first compiles, both touch memory for the first time


def main(argv):
    from config import load_config

    options, config_argv = parse(argv)
    config = load_config([*config_argv, f"--max_steps={WARMUP + options.steps}"])
    if options.measure:
        measured = {"losses": losses_and_memory, "time": step_time}[options.measure]
        print(json.dumps(measured(config, options.steps)))
    else:
        climb(options, config_argv, config)


def parse(argv):
    """The options, and the rest of the command line, which is the config's."""
    from config import BadInput, Parser, stage_names

    parser = Parser(prog="profile.py", description="Measures the ladder.", allow_abbrev=False)
    parser.add_argument("--stages", default=",".join(stage_names()), help="names, separated by commas (default: all)")
    parser.add_argument("--steps", type=int, default=5, help="timed in one process (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed processes of each stage (default: %(default)s)")
    parser.add_argument("--out_dir", help="default: results/<machine>/<config>")
    parser.add_argument("--measure", choices=["losses", "time"], help=argparse.SUPPRESS)  # what one process does
    options, rest = parser.parse_known_args(argv)
    options.stages = options.stages.split(",")
    if unknown := [stage for stage in options.stages if stage not in stage_names()]:
        raise BadInput(f"--stages={','.join(unknown)}: no such stage; `python ladder.py` lists them")
    if min(options.steps, options.repeats) < 1:
        raise BadInput("--steps and --repeats: expected at least 1")
    return options, rest


def climb(options, config_argv, config):
    """Measures every stage that results.json does not hold yet, and writes it after each process."""
    from tqdm import tqdm

    config_name = Path(next((word for word in config_argv if word.endswith(".py")), "defaults")).stem
    conditions = {"machine": machine(config), "config": config_argv, "steps": options.steps}
    folder = Path(options.out_dir or Path("results", machine_name(conditions["machine"]), config_name))
    results = read_results(folder / "results.json", conditions)
    tasks = [(stage, "losses", 1) for stage in options.stages]
    tasks += [(stage, "time", repeat + 1) for repeat in range(options.repeats) for stage in options.stages]
    with tqdm(tasks, unit="process") as bar:
        for stage, what, count in bar:
            bar.set_postfix_str(f"{stage}, {what}")
            row = results["stages"].setdefault(stage, {"losses": [], "time": []})
            if len(row[what]) < count and "error" not in row:
                try:
                    row[what].append(run_alone(stage, what, options.steps, config_argv))
                except RuntimeError as error:
                    row["error"] = str(error)
                write(folder, results)
    print(table(results))
    print(f"{folder}/results.json, table.md and ladder.png are written")


def run_alone(stage, what, steps, config_argv):
    """Measures one stage in a new process. Raises RuntimeError with the last line of what it said if it fails."""
    command = [sys.executable, __file__, *config_argv, f"--stage={stage}", f"--measure={what}", f"--steps={steps}"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError((process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return json.loads(process.stdout.splitlines()[-1])


def begin(config):
    """Sets up a run as train.py does. Returns the device, a function that makes the next step, and the bytes before.

    The bytes are the resident memory before the model was built.
    """
    import dataclasses

    import train

    device = train.set_up(config)
    meta, split, _ = train.open_dataset(config.dataset, config.vocab_size, config.context_length)
    config = dataclasses.replace(config, vocab_size=meta["vocab_size"])
    resident_before = resident_bytes("VmRSS")
    state = train.build(config, device)
    train.choices(config, device)  # refuses what cannot run here
    batches = enumerate(train.training_batches(split, config, 0, device), 1)

    def step():
        number, batch = next(batches)
        return train.train_step(*state, batch, train.learning_rate(number, config), config)[0]

    return device, step, resident_before


def losses_and_memory(config, steps):
    """The losses of the first steps, and the peak bytes of all tensors, from the weights on.

    On CUDA what the allocator counts; on a CPU the sum of every allocation less every release, as torch.profiler
    sees them.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        device, step, _ = begin(config)
        losses = [float(step())]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # without what the compiler tried out
        losses += [float(step()) for _ in range(WARMUP - 1)]
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    else:
        peak, reserved = peak_tensor_bytes(profiler), None
    losses += [float(step()) for _ in range(steps)]
    return {"losses": losses, "tensor_bytes": peak, "reserved_bytes": reserved}


def peak_tensor_bytes(profiler):
    """The highest sum of allocations less releases on the CPU."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def step_time(config, steps):
    """Seconds a step after the warm-up, seconds of the first step, and the peak of resident memory above the start's.

    The clock is read at both ends only, after the device has finished: stages that let the host run ahead gain.
    """
    import torch

    device, step, resident_before = begin(config)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(count):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return (time.perf_counter() - start) / count

    first, _, seconds = timed(1), timed(WARMUP - 1), timed(steps)
    peak = resident_bytes("VmHWM")
    return {"seconds": seconds, "first_step_seconds": first, "resident_bytes": peak and peak - resident_before}


def resident_bytes(field):
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM); None where there is no /proc."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def machine(config):
    """What the figures depend on: processor, device, versions."""
    import torch

    from machine import choose_device

    on_gpu = choose_device(config.device).type == "cuda"
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "native_bfloat16": torch.cpu._is_avx512_bf16_supported(),
        "gpu": torch.cuda.get_device_name(config.device.replace("auto", "cuda")) if on_gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def machine_name(machine):
    """A folder's name for the machine, such as intel-xeon-2-threads-bf16 or nvidia-h200."""
    cpu = f"{machine['cpu']} {machine['threads']} threads" + " bf16" * machine["native_bfloat16"]
    name = (machine["gpu"] or cpu).replace("(R)", "").replace("Processor", "")
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def read_results(path, conditions):
    """What an interrupted climb left under the same conditions, else an empty result."""
    from config import BadInput

    if not path.exists():
        return {**conditions, "stages": {}}
    results = json.loads(path.read_text(encoding="utf-8"))
    if different := [key for key in conditions if results[key] != conditions[key]]:
        what = " and ".join(different)
        raise BadInput(f"{path} was measured under another {what}; choose another --out_dir, or remove it")
    return results


def write(folder, results):
    """Writes results.json, table.md and ladder.png."""
    from report import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(folder / "table.md", table(results) + "\n")
    draw(results, folder / "ladder.png")


def summarize(results):
    """A dict a stage, in the order measured: medians, the spread of the times, the largest gap of a loss to naive's."""
    summaries = []
    measured = [row["losses"][0]["losses"] for row in results["stages"].values() if row["losses"]]
    for stage, row in results["stages"].items():
        summary = {"stage": stage, "error": row.get("error")}
        for run in row["losses"]:
            reference = measured[0]
            gap = max(abs(ours - theirs) for ours, theirs in zip(run["losses"], reference, strict=True))
            summary |= {"loss": run["losses"][-1], "gap": gap, "tensors": run["tensor_bytes"] / 1e9}
        if runs := row["time"]:
            seconds = [run["seconds"] for run in runs]
            summary |= {"seconds": statistics.median(seconds), "spread": max(seconds) - min(seconds), "runs": len(runs)}
            summary["first"] = statistics.median(run["first_step_seconds"] for run in runs)
            if runs[0]["resident_bytes"]:
                summary["resident"] = statistics.median(run["resident_bytes"] for run in runs) / 1e9
        summaries.append(summary)
    return summaries


def table(results):
    """The measurements as a Markdown table, its conditions in the line above it."""
    on = results["machine"]
    rows = summarize(results)
    device = on["gpu"] or f"{on['cpu']}, {on['threads']} threads" + ", native bfloat16" * on["native_bfloat16"]
    lines = [
        f"{device}; torch {on['torch']}; `{' '.join(results['config'])}`; the median of up to "
        f"{max(row.get('runs', 0) for row in rows)} processes of {results['steps']} steps ± half their range.",
        "",
        "| stage | ms/step | against the one before | against naive | tensors GB | resident GB | loss | gap to naive |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for before, row in zip([rows[0], *rows], rows, strict=False):
        cells = [row["stage"]]
        if row["error"]:
            cells += [row["error"].replace("|", "/"), *[""] * 6]
        else:
            cells += [f"{row['seconds'] * 1e3:.0f} ± {row['spread'] * 500:.0f}" if "seconds" in row else ""]
            cells += [speed(before, row), speed(rows[0], row)]
            formats = {"tensors": ".3f", "resident": ".2f", "loss": ".4f", "gap": ".1e"}
            cells += [f"{row[key]:{form}}" if key in row else "" for key, form in formats.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed(before, after):
    """How many times faster, unless the difference is within the spread of the repeats, or there is none to tell."""
    if min(before.get("runs", 0), after.get("runs", 0)) < 2 or before is after:
        return ""
    if abs(before["seconds"] - after["seconds"]) <= max(before["spread"], after["spread"]):
        return "no measurable change"
    return f"{before['seconds'] / after['seconds']:.2f}×"


def draw(results, path):
    """Speed and memory of each stage relative to naive, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in summarize(results) if not row["error"] and "seconds" in row and "tensors" in row]
    if not rows:
        return
    names = [row["stage"] for row in rows]
    size = (11, 0.8 + 0.36 * len(rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    speeds = left.barh(names, [rows[0]["seconds"] / row["seconds"] for row in rows], color="tab:blue")
    left.bar_label(speeds, [f"{row['seconds'] * 1e3:.0f} ms" for row in rows], padding=3)
    left.set(title="speed, times naive (and time of a step)", xlim=(0, 1.2 * left.get_xlim()[1]))
    memory = right.barh(names, [row["tensors"] for row in rows], color="tab:orange")
    right.bar_label(memory, [f"{row['tensors']:.2f} GB" for row in rows], padding=3)
    right.set(title="peak memory of tensors, GB", xlim=(0, 1.2 * right.get_xlim()[1]))
    left.invert_yaxis()
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    from config import run

    run(main)
