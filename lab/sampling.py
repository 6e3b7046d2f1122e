"""Measures the speed of generation: python -m lab.sampling [--models=124M,XL] [--batch=1,8] [--minutes=10]

GPT-2's shapes with random weights, greedy, after a prompt of PROMPT tokens: with a cache, compiled, in half precision
and in int8, beside transformers' generate and nanoGPT's method, which runs the whole window again for each token. Each
case in a process of its own, in turn. Prints Markdown.

A round gives every text a token. Its time is taken in the middle of the new tokens, where it is the mean of all, since
it grows with the length. To get there takes no prompt: for speed any keys and values in a cache do.
"""

import contextlib
import importlib.util
import itertools
import multiprocessing
import statistics
import time
from typing import NamedTuple
from nanoladder.entry import Parser, run_script

import torch
from tqdm import tqdm

from lab.limits import describe
from lab.plan import positive
from lab.sampling_methods import METHODS, weight_bytes
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.infer.speed import copy_rate

SIZES = "n_layer", "n_head", "n_embd", "vocab_size", "context_length"
MODELS = {"124M": (12, 12, 768, 50257, 1024), "XL": (48, 25, 1600, 50257, 1024), "tiny": (2, 2, 32, 300, 64)}
GPT2 = "transformers.models.gpt2.modeling_gpt2"
PROMPT = 256  # tokens, and as many new ones; a quarter of the context if that is less
REPEATS = 3  # of each case; the median counts
WARMUP, ROUNDS = 3, 32  # rounds of a case that are not timed, and that are: fewer after SECONDS, at least LEAST
SECONDS, LEAST = 5.0, 3
SHARE = 1 / 8  # of the minutes that a case may take


class Case(NamedTuple):
    """A row of a table. batch: texts at once. dtype: of weights and cache; of int8, what is not quantized."""

    model: str
    batch: int
    method: str
    dtype: str

    def __str__(self):
        return f"{self.model}, batch {self.batch}, {self.method}, {self.dtype}"


def main(argv):
    options = parse(argv)
    device = machine.choose_device(options.device)
    half = str(machine.choose_dtype("auto", device)).removeprefix("torch.")
    found = measure_all(cases(options, half), options.minutes * 60, device)
    print(tables(found, describe(device), options.minutes))
    for line in comparison(found, half):
        print(f"\n{line}")
    if not importlib.util.find_spec("transformers"):
        print("\nWithout transformers, which is not installed: python -m pip install transformers")


def parse(argv):
    parser = Parser(prog="python -m lab.sampling", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", default="124M,XL", help=f"some of {', '.join(MODELS)} (default: %(default)s)")
    add("--batch", default="1,8", help="numbers of texts at once (default: %(default)s)")
    add("--minutes", type=positive, default=10.0, help="time for all; what is left out says so (default: 10)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    options = parser.parse_args(argv)
    options.models = options.models.split(",")
    if unknown := [name for name in options.models if name not in MODELS]:
        raise BadInput(f"models={unknown[0]}: expected some of {', '.join(MODELS)}")
    if not all(word.isdecimal() and int(word) for word in options.batch.split(",")):
        raise BadInput(f"batch={options.batch}: expected positive integers, separated by commas, such as 1,8")
    options.batch = [int(word) for word in options.batch.split(",")]
    return options


def cases(options, half):
    """The cases in order. half: the name of the machine's own dtype, float32 if it has no half precision."""
    dtypes = list(dict.fromkeys(["float32", half]))
    return [
        Case(model, batch, method, dtype)
        for model, batch, method, dtype in itertools.product(options.models, options.batch, METHODS, dtypes)
        if (method != "int8, compiled" or dtype == half)
        and (not method.startswith("transformers") or importlib.util.find_spec("transformers"))
    ]


# -- processes


def measure_all(cases, seconds, device):
    """Measures the cases in turn, REPEATS times if there is time. Returns {case: its figures, medians, or a "note"}.

    A case that fails, or takes more than SHARE of the seconds, is not repeated.
    """
    deadline, found = time.monotonic() + seconds, {case: [] for case in cases}
    with tqdm(total=REPEATS * len(cases), disable=None, unit="case") as bar:
        for case in cases * REPEATS:
            bar.set_description(str(case))
            if not any("note" in figures for figures in found[case]) and time.monotonic() < deadline:
                found[case].append(apart(measure, SHARE * seconds, case, device))
            bar.update()
    return {case: medians(figures) for case, figures in found.items()}


def medians(repeats):
    """The median of each figure; the note of a case that failed, unless it was measured before."""
    measured = [figures for figures in repeats if "round" in figures]
    if not measured:
        return repeats[0] if repeats else {"note": "not measured: no time left"}
    keys = dict.fromkeys(key for figures in measured for key in figures if key != "note")
    return {key: statistics.median(figures[key] for figures in measured if key in figures) for key in keys}


def apart(measure, seconds, case, device):
    """Joins the dicts that measure(case, device) yields in a process of its own.

    If it fails, or is not done in so many seconds, a "note" says so.
    """
    # A fork of a process that has imported all and computed nothing is as good as a new one, except for CUDA.
    forks = device.type == "cpu" and "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torch._inductor.compile_fx", "nanoladder.infer", GPT2])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs, measure, case, device))
    process.start()
    theirs.close()
    found, deadline = {}, time.monotonic() + seconds
    try:
        while ours.poll(max(0, deadline - time.monotonic())):
            found |= ours.recv()
        process.kill()
        found["note"] = f"too slow: more than {seconds:.0f} s"
    except EOFError:
        process.join()
        if process.exitcode:
            killed = process.exitcode == -9  # by the system
            found.setdefault("note", "out of memory" if killed else f"failed: exit code {process.exitcode}")
    process.join()
    return found


def answer(connection, measure, case, device):
    """Sends what measure(case, device) yields as it comes, or the reason why nothing does."""
    try:
        for figures in measure(case, device):
            connection.send(figures)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        short = reason.splitlines()[0].replace("|", " ")[:80]
        connection.send({"note": "out of memory" if machine.is_out_of_memory(reason) else f"failed: {short}"})
        raise  # with a traceback


def measure(case, device):
    """Yields dicts: "round", its seconds, and "share" of the copy rate; then "first", seconds until the first token."""
    torch.set_flush_denormal(True)
    sizes = dict(zip(SIZES, MODELS[case.model], strict=True))
    n_prompt = prompt_length(case.model)
    needed, free = weight_bytes(sizes, case.dtype), machine.free_memory(device)
    if needed > free:
        yield {"note": f"out of memory: {needed / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB free"}
        return
    build, keywords = METHODS[case.method]
    writer = build(sizes, case.batch, 2 * n_prompt, getattr(torch, case.dtype), device, **keywords)
    prompts = torch.randint(sizes["vocab_size"], (case.batch, 2 * n_prompt), device=device)
    clock, length = Clock(), n_prompt + n_prompt // 2
    with contextlib.suppress(Enough):
        writer.write(prompts[:, :length], 1 + WARMUP + min(ROUNDS, n_prompt // 4), clock, cached=True)
    seconds = statistics.median(clock.rounds())
    yield {"round": seconds, "share": writer.bytes_read(length) / seconds / copy_rate(device)}
    start, clock = time.perf_counter(), Clock()
    writer.write(prompts[:, :n_prompt], 1, clock)
    yield {"first": clock.times[0] - start}


def prompt_length(model):
    """Tokens of a prompt, and new ones."""
    return min(PROMPT, dict(zip(SIZES, MODELS[model], strict=True))["context_length"] // 4)


class Enough(Exception):
    """Raised by a Clock after SECONDS."""


class Clock:
    """Called with the tokens of each round, notes the time. Raises Enough."""

    def __init__(self):
        self.times = []  # the first is that of the prompt

    def __call__(self, tokens):
        self.times.append(time.perf_counter())
        rounds = self.rounds()
        if len(rounds) >= LEAST and sum(rounds) > SECONDS:
            raise Enough

    def rounds(self):
        """Seconds of each round after the WARMUP."""
        return [end - start for start, end in itertools.pairwise(self.times[WARMUP:])]


# -- the report


def tables(found, machine, minutes):
    """The figures in Markdown, a table for each model and batch."""
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    lengths = " or ".join(dict.fromkeys(str(prompt_length(case.model)) for case in found))
    text = [
        f"{where}; torch {machine['torch']}; prompts of {lengths} tokens and as many new ones, greedy, random weights; "
        f"medians of up to {REPEATS} in turn, in {minutes:g} minutes. ms: of a round, in which every text grows by a "
        f"token, in the middle of the new ones. copy: bytes of weights and cache that a round reads in that time, as "
        f"a share of the rate of a copy. × transformers: tokens/s beside its `generate` with a cache, not compiled, at "
        f"the same dtype, or in half precision for int8. first: prompt to first token."
    ]
    for model, batch in dict.fromkeys(case[:2] for case in found):
        lines = [f"GPT-2 {model}, batch {batch}", "", "| | tokens/s | ms | copy | × transformers | first, s |"]
        rows = {case: figures for case, figures in found.items() if case[:2] == (model, batch)}
        text.append("\n".join([*lines, "|---|--:|--:|--:|--:|--:|", *(row(case, found) for case in rows)]))
    return "\n\n".join(text)


def row(case, found):
    """A case as a line of its table."""
    figures = found[case]
    cells = [figures.get("note", ""), "", "", "", ""]
    if seconds := figures.get("round"):
        theirs = found.get(case._replace(method="transformers"), {}).get("round")
        times = f"{theirs / seconds:.2f}" if theirs else ""
        first = f"{figures['first']:.2f}" if "first" in figures else "too slow"
        cells = [f"{case.batch / seconds:.1f}", f"{1e3 * seconds:.1f}", f"{figures['share']:.0%}", times, first]
    return f"| {case.method}, {case.dtype} | {' | '.join(cells)} |"


def comparison(found, half):
    """Yields a line for each model and batch: sample.py's defaults beside its rivals, the prompt included."""
    rivals = {
        "nanoGPT's method in float32, which sample.py had before the cache": ("recompute", "float32"),
        f"transformers' generate in {half}": ("transformers", half),
    }
    for model, batch in dict.fromkeys(case[:2] for case in found):
        n_tokens = prompt_length(model)
        taken = {
            case[2:]: figures["first"] + (n_tokens - 1) * figures["round"]
            for case, figures in found.items()
            if case[:2] == (model, batch) and {"first", "round"} <= figures.keys()
        }
        ours = taken.get(("cached", half))
        told = [f"{taken[key] / ours:.2f} times {name}" for name, key in rivals.items() if ours and key in taken]
        if told:
            yield (
                f"GPT-2 {model}, batch {batch}: as sample.py writes by default, with a cache in {half}, {n_tokens} "
                f"tokens take {ours:.2f} s. It is {', '.join(told)}."
            )


if __name__ == "__main__":
    run_script(main)
