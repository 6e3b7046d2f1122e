"""Steps on paper: the same model as model.py, rates of rings, memory beside the traced step, tables as in the docs."""

import dataclasses
import math
import re

import pytest
from conftest import ROOT

from lab import cluster
from lab.cluster import Layout, gpt, predict_step
from lab.predict import predict_memory
from model import GPT
from nanoladder.config import Config
from nanoladder.parallel.mesh import Grid
from nanoladder.run.metrics import flops_per_token

SMALL = Config(n_layer=4, n_head=4, n_embd=512, context_length=512, vocab_size=512, batch_size=8, compile=False)
PAGE = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
ALONE = Layout(Grid(), "none", 1, 8, False)


def model_of(config):
    return gpt(config.n_layer, config.n_embd, config.n_head, config.context_length, config.padded_vocab_size)


def test_a_model_on_paper_has_the_parameters_and_the_operations_of_the_model():
    real, paper = GPT(SMALL), model_of(SMALL)
    assert paper.n_params == real.n_params
    assert paper.flops() == flops_per_token(real)


@pytest.mark.parametrize("checkpointing", ["none", "every:1"])
def test_memory_on_paper_is_near_that_of_the_traced_step(checkpointing):
    config = dataclasses.replace(SMALL, checkpointing=checkpointing)
    layout = dataclasses.replace(ALONE, recompute=checkpointing != "none")
    traced = predict_memory(config, "cuda")
    workspaces = 65 * 2**20  # of cuBLAS, which the formula leaves out
    assert predict_step(model_of(config), layout, 8).memory == pytest.approx(traced.peak - workspaces, rel=0.15)


def test_every_part_of_a_step_is_cut_as_the_layout_says():
    model, whole = gpt(8, 1024, 16, 1024), predict_step(gpt(8, 1024, 16, 1024), ALONE, 8)
    for grid in (Grid(tensor=4), Grid(context=4), Grid(data=4), Grid(pipeline=4)):
        rows = 1 if grid.pipeline > 1 else 8 // grid.data
        step = predict_step(model, dataclasses.replace(ALONE, grid=grid, rows=rows), 8)
        assert step.compute == pytest.approx(whole.compute / 4)
        sent = {name: getattr(step, name) > 0 for name in ("tensor", "context", "pipeline", "data")}
        averages = grid.data * grid.context > 1  # the processes along context hold the same weights
        assert sent == {**{name: getattr(grid, name) > 1 for name in sent}, "data": averages}
        assert (step.bubble > 0) == (grid.pipeline > 1)
        assert step.seconds > step.compute


def test_sharded_processes_hold_a_share_and_the_gradients_that_wait():
    model = gpt(8, 1024, 16, 1024)
    sharded = [Layout(Grid(data=8), "full", 8, rows, False) for rows in (2, 1)]
    once, twice = (predict_step(model, layout, 16) for layout in sharded)
    activations = once.memory - 16 * model.n_params / 8 - 2 * (2 * model.block + model.outside)
    assert twice.memory == pytest.approx(once.memory - activations / 2 + 4 * model.n_params)


@pytest.mark.parametrize(("n_gpus", "batch_size"), [(64, 512), (24, 192)])
def test_the_fastest_layouts_divide_all_and_fit(n_gpus, batch_size):
    model = gpt(24, 2048, 16, 2048)
    found = cluster.fastest(model, n_gpus, batch_size)
    assert found
    for layout, step in found:
        assert math.prod(layout.grid) == n_gpus
        assert step.memory <= 72e9
        assert step.n_micro * layout.rows * layout.grid.data == batch_size
        assert layout.grid.data * layout.grid.context % layout.n_sharing == 0
    best, least = found[0][1].seconds, min(step.seconds for _, step in found)
    assert best <= cluster.CLOSE * least
    assert cluster.fastest(model, n_gpus, batch_size, memory_gb=0.1) == []


def test_the_docs_table_of_traffic_is_that_of_the_steps(monkeypatch):
    monkeypatch.setattr(cluster, "HOP", 0.0)
    table = re.search(r"ms in a node .*\n.*\n((?:\|.*\n)*)", PAGE)[1]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    in_node = {name: float(ms.replace(",", "")) / 1e3 for name, _, _, ms, _ in lines}
    model, whole = cluster.PLANS["6.7B"][0], Layout(Grid(data=8), "none", 1, 1, False)

    def step(**changes):
        return predict_step(model, dataclasses.replace(whole, **changes), 8)

    tensor = {"grid": Grid(tensor=8), "rows": 8}
    expected = {
        "data: DDP": step().data,
        "`shard=optimizer`": step(shard="optimizer", n_sharing=8).data,
        "`shard=full`": step(shard="full", n_sharing=8).data,
        "tensor": step(**tensor).tensor,
        "tensor, `checkpointing=every:1`": step(**tensor, recompute=True).tensor,
        "context, by heads": step(grid=Grid(context=8), rows=8).context,
        "pipeline": step(grid=Grid(pipeline=8)).pipeline,
    }
    for name, seconds in expected.items():
        assert in_node[name] == pytest.approx(seconds, abs=1e-3), name


def test_the_plans_of_the_docs_are_the_commands_output(capsys):
    cluster.main([])
    assert capsys.readouterr().out.strip() in PAGE


def test_a_config_gets_its_fastest_layouts(capsys):
    cluster.main(["--n_layer=4", "--n_embd=256", "--n_head=4", "--vocab_size=257", "--gpus=16"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and " data" in line]
    assert 1 < len(rows) <= 11
