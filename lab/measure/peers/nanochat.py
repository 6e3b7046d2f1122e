"""nanochat: its own model and optimizer, imported from a checkout, in the step of its scripts/base_train.py.

Nothing in the checkout is changed. It is another model, which trains otherwise: rotary positions, normalized queries
and keys, ReLU², value embeddings, an untied head, Muon. So it gets the config's depth, width, heads, context and
vocabulary, and the same batches, but neither the same weights nor learning rates, and its losses are its own.
"""

import ast
import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import torch

from model import IGNORE

ITS_IGNORE = -1  # target of a padded position
RATES = "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr"  # arguments of base_train.py


def train(task):
    """Trains as base_train.py does, compiled, until the clock ends it. Returns the setting as text."""
    torch.manual_seed(task.naive.seed)
    torch.set_float32_matmul_precision("high")  # as its compute_init
    model = build(task.naive, task.device, task.checkout, task.dtype)
    optimizer = build_optimizer(model, task.checkout)
    scaler = torch.amp.GradScaler(task.device.type, enabled=task.dtype == "float16")
    compiled = torch.compile(model, dynamic=False)
    pinned = task.device.type == "cuda"
    task.clock.start()
    for batch in task.loader(pin_memory=pinned):
        batch = batch.to(task.device, non_blocking=pinned)
        loss = compiled(batch.inputs, batch.targets.masked_fill(batch.targets == IGNORE, ITS_IGNORE))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=True)
        if task.clock.step(loss.item()):
            break
    n_params = sum(parameter.numel() for parameter in model.parameters())
    return f"torch.compile, {task.dtype}, {n_params / 1e6:.1f} M parameters"


def build(config, device, checkout, dtype):
    """Builds its GPT on the device, with its own initial weights; each block attends to the whole context."""
    os.environ["NANOCHAT_DTYPE"] = dtype  # read when it is imported
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path(checkout).resolve()))
    gpt = importlib.import_module("nanochat.gpt")
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_kv_head": config.n_head, "n_embd": config.n_embd}
    shape |= {"sequence_len": config.context_length, "vocab_size": config.vocab_size, "window_pattern": "L"}
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(**shape))
    model.to_empty(device=device)
    model.init_weights()
    return model


def build_optimizer(model, checkout, **settings):
    """Builds its optimizer, with base_train.py's default rates."""
    defaults = vars(arguments(checkout))
    return model.setup_optimizer(**{name: defaults[name] for name in RATES}, **settings)


def arguments(checkout):
    """The default arguments of base_train.py, read from its text; those that are constants."""
    text, found = Path(checkout, "scripts", "base_train.py").read_text(encoding="utf-8"), {}
    for call in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]:
        if getattr(call.func, "attr", "") == "add_argument":
            name = ast.literal_eval(call.args[0]).removeprefix("--").replace("-", "_")
            (default,) = [keyword.value for keyword in call.keywords if keyword.arg == "default"] or [None]
            if isinstance(default, ast.Constant):
                found[name] = default.value
    return Namespace(**found)
