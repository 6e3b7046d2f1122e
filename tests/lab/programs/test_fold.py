"""Folding substitutes values, folds constants, resolves branches and drops unused code."""

import inspect
from textwrap import dedent

import pytest
import torch
from conftest import same, tiny

import train
from lab.programs import bundle, diffs
from lab.programs.bundle import OPTIONS
from lab.programs.fold import NO_OPS, fold
from model import GPT
from nanoladder import optim, parallel
from nanoladder.config import DEFAULTS
from nanoladder.config.stages import fields_up_to, stage_below
from nanoladder.parallel import context, tensor
from nanoladder.run import Run

VALUES = {"on": "True", "off": "False", "zero": "0", "two": "2", "kind": "'b'", "half": "batch_size // 2"}


def folded(source, values=VALUES):
    """A snippet after folding, in a function that is used."""
    body = source.replace("\n", "\n    ")
    result = fold(f"def f(config):\n    {body}\n\n\nf()\n", values)
    return dedent(result.partition("\n")[2].partition("\n\n\nf(")[0])


@pytest.mark.parametrize(
    "expression, result",
    [
        ("config.two", "2"),
        ("model.config.kind", '"b"'),
        ("config.off and x", "False"),
        ("x and config.on", "x"),
        ("config.zero or x", "x"),
        ("config.half or x", "config.batch_size // 2"),
        ("not config.zero", "True"),
        ("1 if config.on else 2", "1"),
        ("1 if x else 2", "1 if x else 2"),
        ("config.two > 1 and x > y", "x > y"),
        ("2 * 512", "2 * 512"),
        ("10 // config.half", "10 // (config.batch_size // 2)"),
    ],
)
def test_expressions(expression, result):
    assert folded(f"return {expression}") == f"return {result}"


@pytest.mark.parametrize("condition, taken", [("config.on", "a()"), ("config.off", "b()"), ("config.half", "a()")])
def test_a_known_condition_leaves_one_branch(condition, taken):
    assert folded(f"if {condition}:\n    a()\nelse:\n    b()") == taken
    assert folded(f"x()\nif {condition}:\n    a()\ny()") == "x()\n" + ("a()\n" if taken == "a()" else "") + "y()"


# -- calls that do nothing while their stage is off

OFF = {"ddp": "False", "dtype": "'float32'"}


def test_calls_that_do_nothing_are_not_shown():
    for source, left in (
        ("return parallel.share(g(x))", "return g(x)"),
        ("return g(parallel.init_process_group(config, d(x)))", "return g(d(x))"),
        ("seed(config.seed + parallel.rank())  # of dropout", "seed(config.seed)"),
        ("scaler.unscale_(optimizer)\ng(x)", "g(x)"),
        ("with autocast(config, device):\n    x = g(x)\nscaler.scale(x).backward()", "x = g(x)\nx.backward()"),
    ):
        assert folded(source, OFF) == left


def test_calls_are_shown_where_their_stage_is_on():
    on = OFF | {"ddp": "True", "dtype": "'auto'"}
    for source in ("return parallel.share(x)", "seed(config.seed + parallel.rank())  # why"):
        assert folded(source, on) == source


CPU = torch.device("cpu")
X = torch.arange(3.0)


class Batches:
    config = tiny()

    def share(self, rank, world_size, positions, at_once):
        assert (rank, world_size, positions, at_once) == (0, 1, None, 1)
        return self


def clipped(clip):
    """Norm that a clipping function returns, and the clipped gradient."""
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.arange(3.0)[None]
    return float(clip(model)), model.weight.grad.tolist()


def unscaled(*methods):
    """A weight of 1 after calls of the float32 scaler's methods; its gradient is 1 and the learning rate 0.5."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad, optimizer = torch.ones(1), torch.optim.SGD([weight], lr=0.5)
    for method in methods:
        method(SCALER, *[optimizer] * (method is not torch.amp.GradScaler.update))
    return weight.item(), weight.grad.item()


def untouched(gpt):
    """True if a model is as GPT() makes it: no hooks, no patched methods, plain parameters."""
    hooks = [module for module in gpt.modules() if module._forward_hooks or module._forward_pre_hooks]
    methods = [name for module in gpt.modules() for name in ("forward", "attend") if name in vars(module)]
    return not hooks and not methods and {type(p) for p in gpt.parameters()} == {torch.nn.Parameter}


Scaler, SCALER = torch.amp.GradScaler, train.build_scaler(tiny(dtype="float32"), CPU)
batches, model = Batches(), torch.nn.Linear(1, 1)
gpt = GPT(tiny(vocab_size=8, tensor_parallel=2, context_parallel=2, pipeline_parallel=2))
parts = [X, X]
# {call: check, with its stage off, that it does only what the table says}
MADE = {
    "parallel.all_reduce_mean": lambda: parallel.all_reduce_mean(X) is X,
    "parallel.add": lambda: parallel.add(0.1) == 0.1,
    "config.seed + parallel.rank()": lambda: parallel.rank() == 0,
    "parallel.share": lambda: parallel.share(batches) is batches,
    "parallel.init_process_group": lambda: parallel.init_process_group(tiny(ddp=False), CPU) is CPU,
    "parallel.synchronize_last": lambda: list(parallel.synchronize_last(model, parts)) == parts,
    "is_reordered": lambda: not tensor.is_reordered("blocks.0.attention.qkv.weight", X),
    "mesh().sizes.tensor": lambda: parallel.mesh().sizes.tensor == 1,
    "mesh().sizes.pipeline": lambda: parallel.mesh().sizes.pipeline == 1,
    "autocast": lambda: not train.autocast(tiny(dtype="float32"), CPU)._enabled,
    "build_scaler": lambda: not SCALER.is_enabled(),
    "scaler.scale": lambda: SCALER.scale(X) is X,
    "scaler.unscale_": lambda: unscaled(Scaler.unscale_) == (1.0, 1.0),
    "scaler.update": lambda: unscaled(Scaler.update) == (1.0, 1.0),
    "scaler.step": lambda: unscaled(Scaler.unscale_, Scaler.step, Scaler.update) == (0.5, 1.0),
    "optim.check_finite": lambda: inspect.signature(optim.check_finite).parameters["scaler"].default is None,
    "Run": lambda: not inspect.signature(Run).parameters["scaler"].default.is_enabled(),
    "positions": lambda: context.positions(tiny()) is None,
    "parallel.local": lambda: parallel.local(X) is X,
    "parallel.in_all_holders": lambda: parallel.in_all_holders(3) == 3,
    "parallel.map_matrices": lambda: torch.equal(
        torch.stack(parallel.map_matrices(torch.exp, [X, X], X)), X.expand(2, 3).exp()
    ),
}


def test_a_call_does_nothing_while_its_stage_is_off():
    naive = fields_up_to("naive") | {key: repr(DEFAULTS[key]) for key in OPTIONS}
    ladder = [row for row in NO_OPS if row[1] not in ("standalone", "mesh")]
    assert set(MADE) == {call for _, _, _, _, *calls in ladder for call in calls}
    off = {(field, repr(value)) for _, field, value, *_ in ladder}
    assert all((field, naive[field]) in off for field, _ in off)
    for call, holds in MADE.items():
        assert holds(), call


def beside(stage):
    """What the diff of a stage shows of our definitions."""
    return bundle.definitions(diffs.script(stage), diffs.script(stage_below(stage)), bundle.values(stage))


IN_STAGES = [(diffs.script.__wrapped__, "naive"), *((beside, stage) for stage in ("muon", "ddp", "shard"))]
RUNNING_ALONE = [(bundle.standalone, stage) for stage in ("ddp", "naive", "low_memory_optimizer", "shard")]


@pytest.mark.slow
def test_without_any_call_of_the_table_a_program_that_is_shown_changes(monkeypatch):
    before = {(show, stage): show(stage) for show, stage in IN_STAGES + RUNNING_ALONE}
    for row in NO_OPS:
        reason, field, value, replacement, *calls = row
        for call in calls:
            fewer = reason, field, value, replacement, *(each for each in calls if each != call)
            monkeypatch.setattr("lab.programs.fold.NO_OPS", [fewer if each is row else each for each in NO_OPS])
            programs = RUNNING_ALONE if field in ("standalone", "mesh") else IN_STAGES + RUNNING_ALONE
            assert reason and any(show(stage) != before[show, stage] for show, stage in programs), call


def test_one_process_divides_no_model():
    assert same(parallel.build(GPT, gpt.config, CPU).state_dict(), gpt.state_dict())
    assert clipped(lambda model: parallel.clip_grad_norm_(model, 0.5)) == clipped(
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    )
    assert parallel.fully_shard(gpt) is parallel.init_shards(gpt, CPU) is None and untouched(gpt)
    assert parallel.apply_pipeline_parallel(gpt) is gpt and untouched(gpt)
    assert parallel.apply_tensor_parallel(gpt) is None and untouched(gpt)
    assert parallel.apply_context_parallel(gpt) is None and untouched(gpt)


BEFORE = """
import os
from a import b, c, d
from e import f as g

# A constant.
SIZE = b(3)


class Used(c):
    def __init__(self, config):
        self.size = config.n

    def forward(self, option=None):
        return self.size

    def helper(self):
        return self.config.off


class Unused(c):
    pass


def helper(config):
    return g(SIZE, os)


def recursive(n):
    return recursive(n - 1)


def main(x, config, y):
    last = 0
    if config.off:
        last = helper(config)
        print(last)
    return Used(x)(option=y)


main(1, make(), y=2)
"""
AFTER = """
from a import c


class Used(c):
    def __init__(self, config):
        self.size = config.n

    def forward(self):
        return self.size


def main(x):
    return Used(x)()


main(1)
"""


def test_unused_code_is_dropped():
    assert fold(f'"""A file."""\n{BEFORE}', VALUES) == f'"""A file."""{AFTER}'


def test_annotations_are_shown_only_where_an_operator_has_its_schema_from_them():
    source = """
from torch import Tensor
from typing import Any


def double(x: Tensor) -> Tensor:
    return 2 * x


{}

operator = register("ours::double", double)
print(call(operator))
"""
    annotated = """def call(
    function: Any, *more: int, group: str = ""
) -> tuple[Tensor, ...]:
    return function(more)  # pyright: ignore"""
    plain = """def call(function, *more, group=""):
    return function(more)"""
    shown = fold(source.format(annotated), {})
    assert shown == source.format(plain).replace("from typing import Any\n", "")
