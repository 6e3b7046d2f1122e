"""Trains a config under every layout and holds each against one process: losses, gradient norms, gathered weights.

    python -m lab.equal config/x.py [more.py ...] [--processes=4] [--steps=12] [--key=value ...]

Layouts are all grids of 2, 4, ... processes along data, tensor, context and pipeline; sharded and not; with every
schedule; in micro-batches; and each of them once more, resumed from the checkpoint of the layout before it. Every step
is train.py's own. Ends with code 1 if a layout trains another model. Sizes are the config's: small ones, and
--compile=False, are quick.
"""

import itertools
import json
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from tqdm import tqdm

import train
from lab import equal_worker, traffic, workers
from lab.layouts import layouts
from nanoladder import data, files, machine
from nanoladder.errors import BadInput
from nanoladder.run import load_config

FLOAT32, HALF = 1e-4, 5e-3  # relative tolerances of losses, by the precision of matrix products
NORMS = {FLOAT32: 20, HALF: 40}  # times that: a norm sums up what rounding does to every gradient
KEYS = ("--ddp=True", "--num_workers=0", "--lr_decay_steps=0")


def main(argv):
    options, words = parse(argv)
    config, words = prepare(words, options)
    limits = tolerances(config, options.tolerance)
    print(conditions(config, limits))
    with tempfile.TemporaryDirectory() as folder:
        rows = train_all(plan(config, options.processes), words, Path(folder), options.explain)
    reference, *others = rows
    judged = [judge(row, reference, limits) for row in others]
    print(table(judged))
    if options.explain:
        print(traffic.explanation(rows))
    if options.out:
        report = {"config": vars(config), "torch": torch.__version__, "tolerances": limits}
        rows = [{**row, "verdict": verdict.text} for row, verdict in zip(others, judged, strict=True)]
        text = json.dumps({**report, "reference": reference, "layouts": rows}, indent=1)
        files.write(Path(options.out), text)
    wrong = [str(verdict) for verdict in judged if not verdict.good]
    if wrong:
        sys.exit(f"error: {len(wrong)} of {len(judged)} runs differ from one process: {'; '.join(wrong)}")


def parse(argv):
    """Splits a command line into lab.equal's options and the config's words."""
    usage = "python -m lab.equal config/x.py [more.py ...] [--processes=4] [--steps=12] [--key=value ...]"
    parser = Parser(prog="python -m lab.equal", usage=usage, description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=2, help="most processes of a layout (default: 2)")
    parser.add_argument("--steps", type=int, default=12, help="updates of each run, at least 2 (default: 12)")
    parser.add_argument("--tolerance", type=float, help="of losses, relative (default: 1e-4 in float32, else 5e-3)")
    parser.add_argument("--explain", action="store_true", help="also print what each collective sends in a step")
    parser.add_argument("--out", metavar="FILE.json", help="also write every loss and distance to a file")
    options, words = parser.parse_known_args(argv)
    if "WORLD_SIZE" in os.environ:
        raise BadInput("lab.equal starts its processes itself; expected `python -m lab.equal`, without torchrun")
    if options.out and not (folder := Path(options.out).parent).is_dir():
        raise BadInput(f"{options.out}: expected a file in a folder that exists, and {folder} does not")
    if options.processes < 2:
        raise BadInput(f"--processes={options.processes}: expected at least 2")
    if options.steps < 2:
        raise BadInput(f"--steps={options.steps}: expected at least 2, as layouts resume from half of them")
    return options, words


def prepare(words, options):
    """The config and the words that every layout trains with. Raises BadInput if layouts could not be equal."""
    config = load_config(words, vars(options))
    if config.dropout:
        raise BadInput(f"dropout={config.dropout}: each layout drops other activations; expected --dropout=0")
    device = machine.choose_device(config.device)
    if device.type == "cuda" and torch.cuda.device_count() < options.processes:
        raise BadInput(
            f"--processes={options.processes} on a machine with {torch.cuda.device_count()} CUDA devices; "
            "expected at most that, or --device=cpu"
        )
    steps = [f"--max_steps={options.steps}", f"--warmup_steps={options.steps // 4}"]
    # The less rounding, the smaller the faults that show; but a GPU's half-precision messages have to be tried as well
    exact = ["--dtype=float32"] * (config.dtype == "auto" and device.type == "cpu")
    words = [*words, *KEYS, *exact, *steps, f"--vocab_size={data.open_dataset(config).vocab_size}"]
    return load_config(words), words


def tolerances(config, given=None):
    """{kind: largest difference of an equal run}: relative for losses and norms; for weights as distances() has it.

    In half precision (or TF32), rounding decides which way weights with small gradients go. Two runs may then end up
    twice as far apart as AdamW moves a weight, which is the sum of the learning rates.
    """
    device = machine.choose_device(config.device)
    exact = device.type == "cpu" or config.matmul_precision == "highest"
    exact = exact and machine.choose_dtype(config.dtype, device) == torch.float32
    usual = FLOAT32 if exact else HALF
    losses = given or usual
    moved = sum(train.learning_rate(step, config) for step in range(1, config.max_steps + 1))
    return {"losses": losses, "norms": NORMS[usual] * losses, "weights": losses if exact else 2 * moved}


def conditions(config, limits):
    """The line above the table."""
    return (
        f"{config.max_steps} updates of {config.n_layer} layers × {config.n_embd}, {config.batch_size} × "
        f"{config.context_length} tokens, dtype {config.dtype}, seed {config.seed}; torch {torch.__version__} on "
        f"{machine.choose_device(config.device)}; tolerances: "
        + ", ".join(f"{kind} {limit:.2g}" for kind, limit in limits.items())
    )


# -- training


def plan(config, processes):
    """[(n, layouts of n processes)]. The first layout is the reference; one process also ends the list, resumed."""
    counts = [2**k for k in range(processes.bit_length())]
    return [*((n, layouts(config, n)) for n in counts), (1, [layouts(config, 1)[0]])]


def train_all(planned, words, folder, explain):
    """Trains every layout. Returns a row, a dict, for each run; the first is the reference's.

    Raises BadInput if the reference cannot be trained.
    """
    rows = []
    with tqdm(total=sum(len(group) for _, group in planned) - 1, unit="layout") as bar:
        for number, (n, group) in enumerate(planned):
            for layout in group:
                bar.set_postfix_str(layout.name)
                kinds = [False] * (number < len(planned) - 1) + [True] * (number > 0 and layout.resumed)
                rows += train_layout(layout, n, kinds, words, folder, explain)
                bar.update()
                if reason := rows[0].get("refused") or rows[0].get("failed"):
                    raise BadInput(f"one process cannot train this config: {reason}")
    return rows


def train_layout(layout, n, kinds, words, folder, explain):
    """Trains a layout by n processes, whole or resumed, in the order of kinds. Returns a row for each run."""
    path = folder / "rows.json"
    path.write_text("[]")
    failed = []
    try:
        workers.run(equal_worker.train_layout, layout, kinds, words, folder, explain, n=n, folder=folder)
    except (ProcessRaisedException, ProcessExitedException) as error:
        failed = [{"name": layout.name, "failed": last_error(str(error))}]
    equal_worker.pass_on(folder, layout.name)
    return json.loads(path.read_text()) + failed


def last_error(text):
    """The line of a traceback, or of several, that says why a process ended."""
    lines = text.strip().splitlines()
    return next(line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line) or line is lines[-1])


# -- judging


@dataclass
class Verdict:
    """A run against the reference: largest differences, relative of losses and norms; none where it did not train."""

    name: str
    resumed_from: str | None
    good: bool
    text: str
    losses: float | None = None
    norms: float | None = None
    weights: float | None = None

    def __str__(self):
        return f"{self.name}, resumed from {self.resumed_from}" if self.resumed_from else self.name


def judge(row, reference, limits):
    """The Verdict on a run, which may have been resumed. A refused layout is no fault; one that failed is."""
    run = row["name"], row.get("resumed_from")
    if "refused" in row:
        return Verdict(*run, True, f"refused: {row['refused']}")
    if "failed" in row:
        return Verdict(*run, False, f"FAILED: {row['failed']}")
    faults, largest = [], {}
    for kind in ("losses", "norms"):
        expected = reference[kind][row["first_step"] - 1 :]
        relative = [distance(one, other) for one, other in zip(row[kind], expected, strict=True)]
        largest[kind] = max(relative)
        beyond = [step for step, value in enumerate(relative, row["first_step"]) if value > limits[kind]]
        if beyond:
            faults.append(f"{kind} from step {beyond[0]}")
    differing = [tensor for tensor, value in row["weights"].items() if value > limits["weights"]]
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        faults.append(f"weights of {differing[0]}{more}")
    if row.get("changed"):
        faults.append(f"the checkpoint's {row['changed'][0]} came back changed")
    text = f"WRONG: {'; '.join(faults)}" if faults else "equal"
    return Verdict(*run, not faults, text, **largest, weights=max(row["weights"].values()))


def distance(one, other):
    """Relative difference; infinite if a number is not finite."""
    return abs(one - other) / abs(other) if math.isfinite(one) and math.isfinite(other) and other else math.inf


def table(verdicts):
    """The matrix as text: a line for each run, those resumed below the run of the same layout."""
    names = [str(verdicts[0])]
    for before, verdict in itertools.pairwise(verdicts):
        below = verdict.resumed_from and verdict.name == before.name
        names.append(f"    resumed from {verdict.resumed_from}" if below else str(verdict))
    width = max(map(len, names))
    lines = [f"{'largest difference of':<{width}}  {'loss':>8}  {'norm':>8}  {'weights':>8}"]
    for name, verdict in zip(names, verdicts, strict=True):
        numbers = (verdict.losses, verdict.norms, verdict.weights)
        cells = "  ".join(f"{'' if number is None else f'{number:.1e}':>8}" for number in numbers)
        lines.append(f"{name:<{width}}  {cells}  {verdict.text}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
