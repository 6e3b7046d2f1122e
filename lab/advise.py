"""Predicts what a step takes and what would make it smaller, for a run that is short of memory.

    python -m lab.advise savings|micro_batch_size --available_bytes=N config/x.py [--key=value ...]

Prints one line of JSON. Training asks in a child process (nanoladder/run/memory.py), as it cannot import the lab.
"""

import contextlib
import dataclasses
import json
from nanoladder.entry import Parser, run_script

from lab import predict
from nanoladder import machine, parallel
from nanoladder.data import find_folder, read_meta
from nanoladder.errors import BadInput
from nanoladder.run import load_config


def main(argv):
    parser = Parser(prog="python -m lab.advise", allow_abbrev=False)
    parser.add_argument("question", choices=["savings", "micro_batch_size"])
    parser.add_argument("--available_bytes", type=int, required=True, help="that the step of one process may take")
    parser.add_argument("--world_size", type=int, default=1, help="processes that share the batch")
    options, config_argv = parser.parse_known_args(argv)
    config = load_config(config_argv)
    if not config.vocab_size:
        meta = read_meta(find_folder(config.dataset), 0)
        config = dataclasses.replace(config, vocab_size=meta["vocab_size"])
    print(json.dumps(answer(options.question, config, options.available_bytes, options.world_size)))


def answer(question, config, available, world_size=1):
    """A dict of what is predicted, in bytes.

    savings: {"peak", "parts": {name: bytes}, which add up to it, and "savings": [(key, value, peak with this change
    alone)], the cheapest change first}.
    micro_batch_size: {"micro_batch_size": the largest that fits into the available bytes, or 0}.
    micro_batch_size=auto counts as 1, the smallest that it may become. Every step counts as if it were not compiled:
    that takes a dozen predictions a second instead of a minute each. Raises BadInput if this cannot be predicted.
    """
    config = dataclasses.replace(config, compile=False)
    device_type = machine.choose_device("auto").type if config.device == "auto" else config.device.partition(":")[0]
    fitting = predict.largest_micro_batch(config, available, device_type, world_size)
    if question == "micro_batch_size":
        return {question: fitting}
    if config.micro_batch_size == "auto":
        config = dataclasses.replace(config, micro_batch_size=1)
    parts = dataclasses.asdict(predict.predict_memory(config, device_type, world_size))
    peak = parts.pop("peak")
    if sum(parts.values()) > 1.001 * peak:
        del parts["gradients"]  # dropped between steps: within the temporary part
    changes = list(savings(config, peak, fitting or 1, device_type, world_size))
    return {"peak": peak, "parts": parts, "savings": changes}


def savings(config, peak, fitting, device_type, world_size):
    """Yields (key, value, predicted peak) of each change that saves a hundredth of the predicted peak or more.

    The cheapest come first: those that cost nothing, then those that cost time, then those that train otherwise.
    fitting: the micro-batch to propose.
    """
    changes = {"set_to_none": True, "attention": "sdpa", "dtype": "auto", "loss_chunks": 8}
    changes |= {"micro_batch_size": fitting, "shard": "full", "checkpointing": "every:1"}
    if config.optimizer == "adamw" and parallel.divide(config, world_size).tensor == 1:
        changes["optimizer"] = "adamw8bit"
    for key, value in changes.items():
        changed = dataclasses.replace(config, **{key: value})
        with contextlib.suppress(BadInput):  # the keys do not work together, or the optimizer's package is missing
            less = predict.predict_memory(changed, device_type, world_size).peak
            if less < 0.99 * peak:
                yield key, value, less


if __name__ == "__main__":
    run_script(main)
