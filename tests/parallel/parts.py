"""Program of test_parts.py: looks at the parts that a process has of a model and a step of tensor parallelism.

train(config) writes its findings to config.out_dir, as JSON, under the process's rank.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

import train as script
from nanoladder import data, parallel
from nanoladder.kernels import softmax


def train(config):
    device = script.set_up(config)
    dataset = data.open_dataset(config)
    config = dataclasses.replace(config, vocab_size=dataset.vocab_size)
    model = script.build_model(config, device)
    batch = next(iter(script.training_batches(dataset.train, config, 1, device)))
    found = look_at_weights(model) | look_at_a_step(model.train(), batch)
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{parallel.rank()}.json").write_text(json.dumps(found))


def look_at_weights(model):
    """Shapes of this process's parts, the bytes of their memory, and if the head is still tied."""
    own = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    return {
        "shapes": {name: list(part.shape) for name, part in own.items()},
        "bytes": {name: part.untyped_storage().nbytes() for name, part in own.items()},
        "tied": model.head.weight is model.token_embedding.weight,
    }


def look_at_a_step(model, batch):
    """Sizes of activations and logits, what is dropped, and the collectives of a forward and a backward."""
    sizes, logits, dropped, softmax_ = {}, [], [], softmax.softmax_
    attention = model.blocks[0].attention
    attend = attention.attend

    def record(name):
        def hook(_, inputs, output):
            sizes[name] = list(getattr(output, "to_local", lambda: output)().shape)

        return hook

    def recorded_attend(q, k, v):
        sizes["q"] = list(q.shape)
        return attend(q, k, v)

    def recorded_softmax(x, *args, **keys):
        logits.append(list(x.shape))
        return softmax_(x, *args, **keys)

    for name in ("blocks.0.attention_norm", "blocks.0.mlp", "norm"):
        model.get_submodule(name).register_forward_hook(record(name))
    model.dropout.register_forward_hook(lambda _, inputs, output: dropped.append((output == 0).tolist()))
    attention.attend, softmax.softmax_ = recorded_attend, recorded_softmax
    with Collectives() as collectives:
        model(batch.inputs, batch.targets).backward()
    attention.attend, softmax.softmax_ = attend, softmax_
    return {"sizes": sizes, "logits": logits, "dropped": dropped, "collectives": collectives.counts}


class Collectives(TorchDispatchMode):
    """Counts collectives, those of the loss's operator excepted: {"name dimensions of the tensor": number}."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional" and "wrap" not in str(function) and "wait" not in str(function):
            name = str(function).split(".")[1].removesuffix("_tensor").removesuffix("_into")
            self.counts[f"{name} {args[0].dim()}"] += 1
        return function(*args, **(kwargs or {}))
