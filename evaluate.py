"""Evaluates a model: the loss over a whole split, and tasks with right and wrong answers.

python evaluate.py --out_dir=out/x [--dataset=NAME]
python evaluate.py --model=hf:gpt2 --tasks FILE.jsonl [MORE.jsonl ...]
python evaluate.py --out_dir=out/x --quantize=int8
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # omitted by python -P

from nanoladder import checkpoint, data, evaluation, files, infer, machine, parallel
from nanoladder.config import Config
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput

FIGURES = {  # in the table: label and format
    "loss": ("loss, nats per token", ".4f"),
    "accuracy": ("accuracy", ".4f"),
    "accuracy_per_token": ("accuracy per token", ".4f"),
    "accuracy_per_byte": ("accuracy per byte", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits_per_byte": ("bits per byte", ".4f"),
}


def main(argv):
    options = parse(argv)
    config = Config(device=options.device, batch_size=parallel.n_launched(), compile=False)
    device = parallel.init_process_group(config, machine.choose_device(options.device))
    machine.configure(config, device)
    try:
        report = evaluate(options, device)
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(error):
            raise
        print(f"error: out of memory; expected a --batch_tokens below {options.batch_tokens}", file=sys.stderr)
        sys.exit(3)
    if options.output and parallel.rank() == 0:
        files.write(options.output, json.dumps(report, indent=2) + "\n")
    parallel.destroy_process_group()


def parse(argv):
    parser = Parser(prog="evaluate.py", description="Evaluates a model on a split and on tasks.", allow_abbrev=False)
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    checkpoint.add_source(parser)
    parser.add_argument("--dataset", help="prepared dataset, by name or path (default, without tasks: the run's)")
    parser.add_argument("--split", default="val", choices=["val", "train"], help="split of the dataset (default: val)")
    parser.add_argument("--context_length", type=int, default=0, help="shorter context (default: the model's)")
    parser.add_argument("--stride", type=int, default=0, help="tokens between windows (default: context_length)")
    parser.add_argument("--tasks", nargs="+", action="extend", default=[], metavar="FILE", help="JSONL files")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="tokens in a batch (default: %(default)s)")
    parser.add_argument(
        "--dtype", default="auto", choices=dtypes, help="dtype of matrix products (default: as in training)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--quantize", choices=["int8"], help="weights of one byte, as in sample.py")
    parser.add_argument("--output", metavar="FILE", help="JSON file for all figures")
    options = parser.parse_args(argv)
    for condition, message in [
        (options.batch_tokens >= 1, "batch_tokens: expected at least 1"),
        (options.context_length >= 0, "context_length: expected at least 1"),
        (
            not options.tasks or options.dataset or (options.split == "val" and not options.stride),
            "split, stride: expected --dataset=NAME too; --tasks alone evaluates no split",
        ),
        (
            not options.output or (Path(options.output).parent.is_dir() and not Path(options.output).is_dir()),
            "output: expected a file in an existing folder",
        ),
    ]:
        if not condition:
            raise BadInput(message)
    return options


def evaluate(options, device):
    """Evaluates the options' splits and tasks, and prints each result. Returns the report, a dict for JSON."""
    source = checkpoint.source_of(options)
    state = checkpoint.load_model(source)
    model = checkpoint.build_gpt(state, source, options.context_length)
    parts = {}
    if dataset := find_dataset(options, source, state, model.config):
        parts[f"{dataset.folder.name} {options.split}"] = evaluation.WholeSplit(dataset, options.split, options.stride)
    if options.tasks:
        tokenizer = checkpoint.tokenizer_of(source, state)
        for path in options.tasks:
            parts[path] = evaluation.Task(Path(path), tokenizer, model.config.context_length)
    report = {**describe(options, source, state, model, device), "results": {}}
    if options.quantize:
        infer.quantize(model.to(device))
    scorer = evaluation.Scorer(model, options.dtype, device, options.batch_tokens)
    own = dataset and options.split == "val" and state.get("data") == dataset.fingerprint()
    for name, part in parts.items():
        report["results"][name] = part.evaluate(scorer)
        print_result(name, report["results"][name])
        if own and isinstance(part, evaluation.WholeSplit) and parallel.rank() == 0:
            report["results"][name]["counted"] = print_counted(part, dataset)
    return report


def find_dataset(options, source, state, config):
    """Opens the dataset to evaluate on; None if the options name only tasks. Raises BadInput if it does not fit."""
    if options.tasks and not options.dataset:
        return None
    name = options.dataset or state["config"].get("dataset")
    if name is None:
        raise BadInput(f"nothing to evaluate {source} on; expected --dataset=NAME or --tasks FILE")
    dataset = data.open_dataset(dataclasses.replace(config, dataset=name))
    checkpoint.check_tokenizer(dataset, name, state, source)
    return dataset


# -- the report


def describe(options, source, state, model, device):
    """Returns and prints the facts about the model and the settings."""
    n_processes = parallel.world_size()
    weights = f", weights in {options.quantize}" if options.quantize else ""
    dtype = str(machine.choose_dtype(options.dtype, device)).removeprefix("torch.")
    step = state["progress"]["step"] if "progress" in state else None
    T = model.config.context_length
    print(f"model    {source}{f', step {step}' if step else ''}")
    print(f"size     {model.n_params:,} parameters, context_length {T}")
    print(f"device   {device}, {dtype}{weights}, {n_processes} {'process' if n_processes == 1 else 'processes'}")
    return {
        "model": {"source": source, "step": step, "parameters": model.n_params, "context_length": T},
        "settings": {
            "device": str(device),
            "dtype": dtype,
            "quantize": options.quantize,
            "processes": n_processes,
            "batch_tokens": options.batch_tokens,
            "stride": options.stride,
        },
    }


def print_result(name, result):
    """Prints the counts of a result, then a line for each figure, with its standard error."""
    counts = [f"{value:,} {key.replace('_', ' ')}" for key, value in result.items() if type(value) is int]
    print(f"\n{name}: {', '.join(counts)}")
    for key, (label, form) in FIGURES.items():
        if result.get(key) is not None:
            error = f" ± {result[f'{key}_stderr']:.4f}" if f"{key}_stderr" in result else ""
            print(f"  {label:<22}{result[key]:{form}}{error}")


def print_counted(part, dataset):
    """Counts the training split, and prints what that predicts of the windows of val. Returns {name: loss in nats}."""
    windows = f"every {every}th of these windows" if (every := part.every_counted) > 1 else "these windows"
    print(f"  counting the training data, for comparison on {windows} (docs/evaluation.md) ...")
    losses = part.count(dataset)
    factor, unit = dataset.unit
    for name, loss in losses.items():
        print(f"  {name:<22}{loss * factor:.4f} {unit}")
    return losses


if __name__ == "__main__":
    run_script(main)
