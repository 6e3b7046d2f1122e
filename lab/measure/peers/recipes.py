"""Whole runs by other projects' recipes: their models, optimizers and schedules, on a config's batches and windows.

python -m lab.measure.peers.recipes PEER CHECKOUT FACTOR config/x.py [--key=value ...]: what `train.py config/x.py` is
for ours. The model has the config's depth, width and heads. FACTOR multiplies all rates. It writes metrics.jsonl alone.

Nothing in a checkout is changed, and none of its code is copied here: nanochat is imported; of a script, which would
train when imported, its definitions are executed, its default arguments read.
"""

import ast
import contextlib
import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lab.measure.peers import nanochat
from lab.measure.peers.nanochat import ITS_IGNORE
from model import IGNORE
from nanoladder import data, machine
from nanoladder.config import Config
from nanoladder.run import load_config
from nanoladder.run.metrics import METRICS
from train import autocast, evaluate

MODULES = "contextlib", "dataclasses", "math", "pathlib", "torch"  # that the definitions of a script may import
IN_FLOAT32 = {"torch.bfloat16": "torch.float32", ".bfloat16()": ".float()"}


class Recipe(NamedTuple):
    """model: token ids and targets (B, T) -> summed loss () in nats. set_rates(step): before step 0, 1, ...

    context: in which a training loss is computed.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    set_rates: Callable[[int], None]
    context: contextlib.AbstractContextManager = contextlib.nullcontext()


class Task(NamedTuple):
    """config: with the dataset's vocab_size. dtype: of matrix products, such as float32."""

    config: Config
    checkout: Path
    device: torch.device
    dtype: str


class Summed(nn.Module):
    """nanochat's model or one like it, called as ours is. settings: more arguments, with which it sums the loss."""

    def __init__(self, model, **settings):
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, inputs, targets):
        return self.model(inputs, targets.masked_fill(targets == IGNORE, ITS_IGNORE), **self.settings)


def definitions(task, file, changes):
    """Executes the definitions of a script of the checkout, and returns its names. changes: {text: its new one}.

    In float32, nothing is cast to bfloat16, which some processors emulate.
    """
    tree = parse(task, file, changes)
    module = types.ModuleType(Path(file).stem + "_of_a_peer")
    sys.modules[module.__name__] = module  # where dataclasses look up types
    execute([node for node in tree.body if is_definition(node)], module.__dict__)
    return module.__dict__


def parse(task, file, changes):
    """Returns the syntax tree of a script of the checkout."""
    text = Path(task.checkout, file).read_text(encoding="utf-8")
    for old, new in (changes | (IN_FLOAT32 if task.dtype == "float32" else {})).items():
        text = text.replace(old, new)
    return ast.parse(text)


def is_definition(node):
    """True for a class, a function, a constant, and an import of MODULES."""
    if isinstance(node, ast.ImportFrom):
        return str(node.module).partition(".")[0] in MODULES
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in MODULES for alias in node.names)
    if isinstance(node, ast.Assign):
        constant = not any(isinstance(part, (ast.Call, ast.Name)) for part in ast.walk(node.value))
        return constant and all(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, (ast.ClassDef, ast.FunctionDef))


def execute(statements, names):
    exec(compile(ast.Module(statements, []), "<a peer's script>", "exec"), names)


# -- the peers


def of_nanochat(task):
    """nanochat, by base_train.py: its rates for 2^19 tokens a step, which it scales by the root of a smaller batch."""
    names = definitions(task, "scripts/base_train.py", {})
    rates, steps = nanochat.arguments(task.checkout), task.config.max_steps
    names |= {"args": rates, "num_iterations": steps, "weight_decay_scaled": rates.weight_decay}
    model = nanochat.build(task.config, task.device, task.checkout, task.dtype)
    optimizer = nanochat.build_optimizer(model, task.checkout, weight_decay=rates.weight_decay)
    return Recipe(Summed(model, loss_reduction="sum"), [optimizer], scheduled(optimizer, names, lambda step: step))


def of_autoresearch(task):
    """autoresearch, by train.py. Its schedule follows the share of its time that has passed: here, of the steps."""

    def attention(q, k, v, causal, window_size):  # (B, T, nh, hs) -> the same; windows are of the whole context
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    names = definitions(task, "train.py", {})
    names["fa3"] = types.SimpleNamespace(flash_attn_func=attention)
    shape = {"window_pattern": "L", "n_kv_head": task.config.n_head, "sequence_len": task.config.context_length}
    shape |= {key: getattr(task.config, key) for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    model = names["GPT"](names["GPTConfig"](**shape)).to(task.device)
    model.init_weights()
    rates = {f"{name}_lr": names[f"{name.upper()}_LR"] for name in ("embedding", "unembedding", "matrix", "scalar")}
    optimizer = model.setup_optimizer(adam_betas=names["ADAM_BETAS"], weight_decay=names["WEIGHT_DECAY"], **rates)
    progress = scheduled(optimizer, names, lambda step: step / task.config.max_steps)
    return Recipe(Summed(model, reduction="sum"), [optimizer], progress, autocast(task.config, task.device))


def scheduled(optimizer, names, progress):
    """A function that sets an optimizer's rates before a step, by a script's functions, of progress(step)."""

    def set_rates(step):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * names["get_lr_multiplier"](progress(step))
            if group["kind"] == "muon":
                group["momentum"] = names["get_muon_momentum"](step)
                group["weight_decay"] = names["get_weight_decay"](progress(step))

    return set_rates


def of_modded(task):
    """modded-nanogpt, by the script of its third track, whose loop over trials begins with weights and optimizers."""
    config, changes = task.config, {"head_dim=128": f"head_dim={task.config.n_embd // task.config.n_head}"}
    names = definitions(task, CHECKOUTS["modded"][0], changes)
    one = {"get_world_size": lambda: 1, "get_rank": lambda: 0, "all_gather": lambda *_: None}
    names["dist"] = types.SimpleNamespace(**one)
    model = names["model"] = names["GPT"](config.vocab_size, config.n_layer, config.n_embd).to(task.device)
    (trial,) = [node for node in parse(task, CHECKOUTS["modded"][0], changes).body if isinstance(node, ast.For)]
    (end,) = [n for n, node in enumerate(trial.body) if getattr(node, "name", "") == "set_hparams"]
    execute(trial.body[: end + 1], names)
    names["train_steps"] = config.max_steps
    return Recipe(model, names["optimizers"], names["set_hparams"])  # it sums, and ignores IGNORE, as ours


RECIPES = {"nanochat": of_nanochat, "autoresearch": of_autoresearch, "modded": of_modded}

CHECKOUTS = {  # {peer: a file of its checkout, the repository}
    "nanochat": ("scripts/base_train.py", "karpathy/nanochat"),
    "autoresearch": ("train.py", "karpathy/autoresearch"),
    "modded": ("records/track_3_optimization/train_gpt_simple.py", "KellerJordan/modded-nanogpt"),
}


# -- a run


def main(peer, checkout, factor, *words):
    """Trains to the end of the config."""
    config = load_config([*words])
    dataset, device = data.open_dataset(config), machine.choose_device(config.device)
    config = dataclasses.replace(config, vocab_size=dataset.vocab_size)
    dtype = str(machine.choose_dtype(config.dtype, device)).removeprefix("torch.")
    torch.manual_seed(config.seed)
    if not config.compile:
        torch.compiler.set_stance("force_eager")
    recipe = RECIPES[peer](Task(config, Path(checkout), device, dtype))
    recipe.model.compile(dynamic=False)
    for group in [group for optimizer in recipe.optimizers for group in optimizer.param_groups]:
        group["initial_lr"] *= float(factor)
    path = Path(config.out_dir, METRICS)
    path.parent.mkdir(parents=True)
    batches = data.TrainingBatches(dataset.train, config)
    with path.open("a", buffering=1) as metrics:
        for step in range(1, config.max_steps + 1):
            row: dict = {"step": step, "tokens": step * config.batch_size * config.context_length}
            row["train_loss"] = take_step(recipe, step, batches[step].to(device))
            if step == config.max_steps:
                row["val_loss"] = evaluate(recipe.model, dataset.val, config, device)  # pyright: ignore  as a GPT
                row["val_bpb"] = row["val_loss"] * dataset.bits_per_nat
            metrics.write(json.dumps(row) + "\n")


def take_step(recipe, step, batch):
    """Takes a step, as all three do. Returns the mean loss."""
    with recipe.context:
        loss = recipe.model(batch.inputs, batch.targets) / batch.n_tokens
    loss.backward()
    recipe.set_rates(step - 1)
    for optimizer in recipe.optimizers:
        optimizer.step()
    recipe.model.zero_grad(set_to_none=True)
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
