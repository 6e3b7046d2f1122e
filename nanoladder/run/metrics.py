"""What a run shows: the header, the step clock, metrics.jsonl, the progress bar, loss.png and wandb."""

import contextlib
import dataclasses
import json
import math
import re
import resource
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from nanoladder import files, optim, parallel
from nanoladder.config import differences
from nanoladder.data.batches import tokens_seen
from nanoladder.errors import BadInput

# Dense peaks in TFLOP/s of bfloat16 (of float16 on GPUs without it), from NVIDIA's datasheets. The first name
# that is part of the device's name counts; a device that is not listed has no MFU rather than a wrong one.
PEAK_TFLOPS = {
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}


def peak_flops(device):
    """Dense half-precision FLOP/s of all processes' CUDA devices by datasheet, None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    other = "(?! Laptop| D\\b|.* MIG )"  # smaller ones, and parts of one
    matches = (peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b{other}", name))
    return next((peak * 1e12 * parallel.world_size() for peak in matches), None)


def peak_memory_gb(device):
    """Peak allocated memory of a CUDA device, peak resident memory of the process on a CPU, in GB (1e9 bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def throughput(seconds, tokens, flops_per_token, peak):
    """The metrics of a step that took `seconds` over `tokens`; none if it was not timed (seconds None)."""
    if seconds is None:
        return {}
    rate = tokens / seconds
    return {"step_ms": seconds * 1e3, "tokens_per_s": rate} | ({"mfu": rate * flops_per_token / peak} if peak else {})


def bits_per_byte(loss, meta):
    """Nats per token -> bits per byte of the validation text, comparable across tokenizers, where that is known."""
    if "bytes" not in meta:
        return {}
    return {"val_bpb": loss / math.log(2) * meta["tokens"]["val"] / meta["bytes"]["val"]}


class StepClock:
    """Measures training steps alone: it is paused while anything else is done, and waits for the device."""

    def __init__(self, device):
        self.device = device

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self, step):
        """Begins a lap after `step`."""
        self.began, self.step = self.synchronize(), step

    def lap(self, step):
        """Mean seconds a step since the lap began, None if no step was timed; begins the next lap."""
        now = self.synchronize()
        seconds = (now - self.began) / (step - self.step) if step > self.step else None
        self.began, self.step = now, step
        return seconds

    @contextlib.contextmanager
    def paused(self):
        before = self.synchronize()
        yield
        self.began += self.synchronize() - before


class Report:
    """Where a run's numbers go: out_dir/metrics.jsonl, the terminal, out_dir/loss.png and, if asked, wandb."""

    def __init__(self, config, start_step):
        self.config = config
        self.folder = Path(config.out_dir)
        self.path = self.folder / "metrics.jsonl"
        self.rows = [row for row in read_metrics(self.path) if row["step"] <= start_step]
        self.behind = False  # whether the file lacks rows
        try:
            self.write_rows()
            files.write(self.folder / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        except OSError as error:
            raise BadInput(f"out_dir={self.folder} cannot be written ({error}); choose another --out_dir") from None
        self.tracker = start_wandb(config)
        self.bar = tqdm(total=config.max_steps, initial=start_step, unit="step", disable=None, dynamic_ncols=True)

    def first_step(self, seconds):
        """Says what the first step took, which no metric counts: it pays for memory never touched, and compilation."""
        text = f"first step: {seconds:.1f} s"
        if self.config.compile:
            cache = torch._dynamo.utils.counters["inductor"]
            warm = cache["fxgraph_cache_hit"] > 0 == cache["fxgraph_cache_miss"]
            text += f", with compilation {'from the cache' if warm else '(its cache makes the next start shorter)'}"
        tqdm.write(text)

    def log(self, row):
        """Keeps one row of metrics and shows it: in the bar on a terminal, as a line elsewhere."""
        row = {key: value for key, value in row.items() if math.isfinite(value)}  # float16 may skip a step
        self.rows.append(row)
        self.keep(row)
        self.track(lambda run: run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"]))
        line = "  ".join(f"{label} {row[key]:{form}}" for key, label, form in COLUMNS if key in row)
        if self.bar.disable or "val_loss" in row:
            tqdm.write(line)
        self.bar.n = row["step"]
        self.bar.set_postfix_str(line.partition("  ")[2])

    def write_rows(self):
        files.write(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def keep(self, row):
        """Adds a row to the file; where that fails, training goes on, and the next row brings all that are missing."""
        try:
            if self.behind:
                self.write_rows()
            else:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            self.behind = False
        except OSError as error:
            if not self.behind:
                tqdm.write(f"warning: {self.path.name} is behind: {error}", file=sys.stderr)
            self.behind = True

    def track(self, action):
        """Does something with the wandb run, if there is one; what goes wrong there never stops training."""
        try:
            if self.tracker:
                action(self.tracker)
        except Exception as error:
            tqdm.write(f"warning: wandb is no longer used: {error}", file=sys.stderr)
            self.tracker = None

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        self.bar.close()
        crashed = failure and issubclass(failure, Exception)  # perhaps for want of memory, and drawing takes some
        if self.rows and not crashed:
            try:
                plot(self.rows, self.folder / "loss.png", self.folder.name)
            except OSError as error:
                print(f"warning: loss.png is not drawn: {error}", file=sys.stderr)
        self.track(lambda run: run.finish())
        if self.behind and failure is None:
            sys.exit(f"error: {self.path} lacks rows up to step {self.rows[-1]['step']}, which could not be written")


class Silent:
    """The report of a process that is not the first: none."""

    def first_step(self, seconds):
        pass

    def log(self, row):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


COLUMNS = [
    ("step", "step", "5d"),
    ("train_loss", "train", ".4f"),
    ("val_loss", "val", ".4f"),
    ("val_bpb", "bits/byte", ".4f"),
    ("lr", "lr", ".2e"),
    ("grad_norm", "grad norm", ".2f"),
    ("step_ms", "ms/step", ".1f"),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("mfu", "mfu", ".1%"),
    ("peak_memory_gb", "GB", ".2f"),
]


def read_metrics(path):
    """The rows of a metrics.jsonl, without a last line that was cut off; none if there is no file."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def header(config, model, meta, choices):
    """Prints what is trained, what differs from the defaults, and what was chosen and why."""
    tokens = config.batch_size * config.context_length
    flops = model.flops_per_token() * tokens_seen(config.max_steps, config)
    print(f"model     {model.n_params():,} parameters; {meta['vocab_size']:,} token ids")
    print(f"data      {config.dataset}: {meta.get('tokenizer', 'unknown tokenizer')}")
    micro = f", {config.micro_batch_size} at a time" if config.micro_batch_size else ""
    growth = f" after {config.batch_warmup_steps} steps of growth" if config.batch_warmup_steps else ""
    print(f"step      {tokens:,} tokens = {config.batch_size} sequences × {config.context_length}{growth}{micro}")
    print(f"run       {config.max_steps:,} steps, {flops / (1e15 * 86400):.3g} PF-days of arithmetic")
    if config.lr_scaling != "none":
        by = f"{config.lr_scaling} in batch_size={config.batch_size} / {config.lr_reference_batch}"
        print(f"rate      learning_rate and min_lr × {optim.batch_factor(config):.4g}: {by}")
    changed = "  ".join(f"{key}={value}" for key, value in differences(config).items())
    print(f"config    {changed or 'all defaults'}")
    for what, choice in choices.items():
        print(f"{what:<9} {choice}")


def start_wandb(config):
    """The wandb run, or None: off, or unreachable, which never stops a training run."""
    if config.wandb == "off":
        return None
    try:
        import wandb

        return wandb.init(
            project=config.wandb_project,
            name=Path(config.out_dir).name,
            config=dataclasses.asdict(config),
            mode=config.wandb,
            dir=config.out_dir,
            settings=wandb.Settings(init_timeout=30),
        )
    except Exception as error:
        print(f"warning: wandb is not used: {error}", file=sys.stderr)
        return None


def plot(rows, path, title):
    """Draws loss, learning rate and throughput over the steps into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def draw(axis, key, **style):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axis.plot(*zip(*points, strict=True), **style)

    figure, axes = plt.subplot_mosaic("LLR;LLT", figsize=(11, 5), layout="constrained")
    draw(axes["L"], "train_loss", label="train", color="tab:blue", linewidth=1.2)
    draw(axes["L"], "val_loss", label="validation", color="tab:orange", marker="o", markersize=4)
    last = next((row for row in reversed(rows) if "val_loss" in row), None)
    note = f": validation {last['val_loss']:.3f} at step {last['step']}" if last else ""
    axes["L"].set(title=title + note, xlabel="step", ylabel="loss (nats per token)")
    if axes["L"].lines:
        axes["L"].legend()
    draw(axes["R"], "lr", color="tab:green")
    axes["R"].set(title="learning rate", xlabel="step", ylim=(0, None))
    draw(axes["T"], "tokens_per_s", color="tab:red")
    axes["T"].set(title="tokens per second", xlabel="step", ylim=(0, None))
    for axis in axes.values():
        axis.grid(alpha=0.3)
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    plt.close(figure)
