"""--mode=recipe finds what planted rungs are worth, in a fixed order, and resumes after an interruption."""

import json
import math
import random
import re
import time
from pathlib import Path

import pytest
from conftest import flags, replace, tiny

import train
from lab.measure import cli, modes, runs, training
from lab.research import by_loss, recipe, recipe_report
from lab.research.equivalent_tokens import Curve
from lab.research.protocol import TrainingRun
from nanoladder.run import load_config
from nanoladder.run.metrics import read_metrics

STEPS, RATE = 1000, 0.01
RUNGS = {
    "base": {"beta2": 0.95},
    "good": {"optimizer": "muon"},
    "nothing": {"grad_clip": 0.5},
    "bad": {"bias": True},
    "late": {"weight_decay": 0.2},
}
WORTH = {"good": 1.5, "nothing": 1.0, "bad": 0.8, "late": 1.2}  # in tokens
TREE = [("", "base"), ("", "good"), ("└ ", "bad"), ("", "nothing"), ("", "late")]  # the trunk, and a branch


class World:
    """Trains in no time. The loss is a power of the tokens, each multiplied by the worth of the config's rungs."""

    def __init__(self, monkeypatch):
        self.rungs, self.configs, self.steps, self.most = RUNGS, [], [], None
        self.diverges, self.short = (lambda config: False), (lambda config: 0.0)
        self.running = self.most_running = self.fails = 0
        monkeypatch.setattr(recipe, "Child", lambda words, environment: Player(self, load_config(words)))
        monkeypatch.setattr(runs, "PAUSE", 0.0)
        monkeypatch.setattr("os.fsync", lambda _: None)
        monkeypatch.setattr(recipe.torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr(recipe, "run_alone", self.step)
        monkeypatch.setattr(recipe, "machine_name", lambda facts: "a-machine")
        monkeypatch.setattr(recipe, "rungs_of", lambda config: self.rungs)
        monkeypatch.setattr(cli, "stage_names", lambda *_: [*self.rungs])

    def step(self, function, config):
        self.steps += [config] * (function is not recipe.measurements.machine_facts)
        return {"seconds": 0.3 if config.optimizer == "muon" else 0.2, "memory": {"peak": 3e9}}

    def loss(self, config):
        rungs = [name for name in WORTH if all(getattr(config, key) == value for key, value in RUNGS[name].items())]
        length = config.max_steps / STEPS * math.prod(WORTH[name] for name in rungs)
        wrong_rate = math.log2(config.learning_rate / RATE / (4 if "good" in rungs else 1))
        of_seed = random.Random(config.seed).gauss(0, 0.05)
        own = random.Random(str(replace(config, dataset="x"))).gauss(0, 2e-4)
        return 2.0 + 1.5 * length**-0.3 + 0.1 * wrong_rate**2 + of_seed + own + self.short(config)


class Player:
    """Fake of a Child."""

    def __init__(self, world, config):
        if len(world.configs) == world.most:
            raise KeyboardInterrupt
        world.configs.append(config)
        world.running += 1
        world.most_running = max(world.running, world.most_running)
        self.world, self.config, self.looks = world, config, 2

    def __enter__(self):
        return self

    def outcome(self):
        self.looks -= 1
        if self.looks:
            return None
        if self.world.fails > 0:
            self.world.fails -= 1
            nothing = {"val_loss": None, "val_bpb": None, "tokens": None}
            return {"seconds": 1.0, "note": "failed: no room", "failed": True, **nothing}
        loss = None if self.world.diverges(self.config) else self.world.loss(self.config)
        note = "diverged: stopped at step 3" if loss is None else None
        losses = {"val_loss": loss, "val_bpb": loss and 0.5 * loss, "tokens": 384}
        return {"seconds": 1.0, "note": note, "failed": False, **losses}

    def __exit__(self, *_):
        self.world.running -= 1


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def run(dense, tmp_path, run_main):
    """run(*words) runs profile.py --mode=recipe. Returns its result, the rows of recipe.json, and the trials."""

    def run(*words):
        own = flags(dataset=dense, max_steps=STEPS, learning_rate=RATE, min_lr=RATE / 10)
        done = run_main(modes.main, *own, "--mode=recipe", f"--out_dir={tmp_path}", *words)
        path = tmp_path / "recipe.json"
        rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
        _, found = runs.read(tmp_path / runs.RUNS, "recipe")
        trials = [
            {**run.row["about"], "config": run.row["keys"], **(run.figures or {"note": run.failed})}
            for run in found
            if run.row["what"] == "train"
        ]
        return done, rows, trials

    return run


def test_the_picture_shows_rungs_that_were_left_out_apart_from_the_recipe(tmp_path, drawn):
    factor, note = {"times": 3.5, "low": 3.0, "high": 4.0}, "kept at another scale: holds"
    together = {"name": "together", "note": None, "verdict": "holds", "tokens": factor, "screened": [0.5, 2.0]}
    rows = [together, {"name": "good", "note": note, "verdict": "holds", "without": factor}]
    recipe_report.draw(Curve({0.25: 5.0, 1.0: 4.0, 2.0: 3.5}), rows, tmp_path / "recipe.png")
    _, reached, left_out = drawn[0].axes
    shown = {axis: [text.get_text() for text in axis.get_yticklabels()] for axis in (reached, left_out)}
    assert shown == {reached: ["together"], left_out: ["without good"]}
    (bar,), (other,) = reached.patches, left_out.patches
    assert bar.get_facecolor() != other.get_facecolor() and (other.get_x(), other.get_width()) == (1.0, 2.5)


@pytest.mark.slow
def test_planted_rungs_are_found_by_whole_runs_and_none_is_run_twice(world, run, tmp_path):
    done, rows, found = run()
    assert done.code == 0 and world.most_running == 2
    cumulative, left_out = 1.0, {"nothing", "bad"}
    for name, true in WORTH.items():
        for kind, expected in {"tokens": cumulative * true, "step": true, "alone": true, "without": true}.items():
            if kind != "without" or name not in left_out:
                estimate = rows[name][kind]
                assert estimate["n"] == 5 and estimate["times"] == pytest.approx(expected, rel=0.01)
                assert estimate["low"] < expected * 1.003 and estimate["high"] > expected * 0.997
        cumulative *= 1.0 if name in left_out else true
    verdicts = [row["verdict"].partition(" (")[0] for row in rows.values()]
    assert verdicts == ["the base", "holds", "not significant", "costs", "holds"]
    assert [row["lr_factor"] for row in rows.values()] == [1, 4, 4, 4, 4]  # an edge is passed
    assert "not significant" in (tmp_path / "recipe.md").read_text() and (tmp_path / "recipe.png").stat().st_size > 1e4
    for row, config in zip(found, world.configs, strict=True):
        assert config.eval_interval == config.max_steps == round(row["length"] * STEPS) and config.save_interval == 0
        assert config.min_lr == pytest.approx(config.learning_rate / 10) and config.warmup_steps == 2
    order = [(row["name"], row["seed"], row["lr_factor"]) for row in found]
    assert order[:9] == [("base", seed, factor) for factor in (0.5, 1, 2) for seed in range(3)]
    assert order[9:16] == [("base", seed, 1) for seed in range(3, 10)]
    first = [(name, seed > 9) for name, seed, _ in order].index
    assert first(("good", False)) < first(("late", False)) < first(("base", True)) < first(("good", True))
    assert first(("late", True)) < first(("late alone", False)) < first(("without late", False))
    assert rows["late"]["gain"] == pytest.approx(1.8 / 1.5, rel=0.01) and rows["late"]["peak"] == 3e9
    assert len(world.steps) == 5 * (3 + 1)
    assert (
        run()[1] == rows
        and len(world.steps) == 20
        and len(set(map(str, world.configs))) == len(world.configs) == len(found)
    )


@pytest.mark.slow
def test_rungs_that_another_scale_has_kept_are_measured_together_and_left_out(world, run):
    # Without Muon twice the base's rate is bad, and four times, Muon's, better again: no place to search from
    world.short = lambda config: float(config.optimizer != "muon" and config.learning_rate == 2 * RATE)
    _, rows, found = run("--kept=late,good,nothing")
    assert [*rows] == ["base", "good", "nothing", "late", "together"] and {row["name"] for row in found} == {
        *("base", "together", "without good", "without nothing", "without late"),
        *("good alone", "nothing alone", "late alone"),
    }
    together = rows["together"]
    assert together["tokens"]["times"] == pytest.approx(1.8, rel=0.01) and together["verdict"] == "holds"
    assert rows["good"]["note"] == "kept at another scale: holds"
    assert rows["nothing"]["note"].startswith("kept at another scale: not significant")
    for kind in ("without", "alone"):
        assert rows["good"][kind]["times"] == pytest.approx(1.5, rel=0.01)
    assert run("--kept=fine")[0].err.startswith("error: argument --kept: unknown 'fine'")


@pytest.mark.slow
def test_the_base_may_have_rungs_already(world, run, tmp_path):
    _, rows, found = run("--on=good", "--rungs=nothing,late")
    assert [*rows] == ["base", "nothing", "late"] and rows["late"]["tokens"]["times"] == pytest.approx(1.2, rel=0.01)
    assert all(row["config"]["optimizer"] == "muon" for row in found)
    assert "The base has good." in (tmp_path / "recipe.md").read_text()
    assert run("--on=good", "--rungs=good")[0].err.startswith("error: --on, --rungs: the base has every rung")


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, 20, 100])
def test_it_resumes_after_ctrl_c_and_says_what_is_known(world, run, most):
    world.most = most
    done, _, before = run()
    assert done.code == 130 and len(before) >= most - 2 and world.running == 0
    assert ("rate is not known yet" in done.out) == (most < 9) and ("not screened yet" in done.out) == (most == 20)
    assert not world.steps
    world.most = None
    assert run()[1]["late"]["verdict"] == "holds"
    assert not set(map(str, world.configs[most:])) & set(map(str, world.configs[: most - 2]))


def test_no_trial_starts_after_the_time(world, run, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    done, _, rows = run("--minutes=0.5")
    assert done.code == 0 and 1 < len(rows) < 30 and world.running == 0


@pytest.mark.slow
def test_trials_that_diverge_are_rows_that_say_so(world, run):
    world.diverges = lambda config: config.bias or config.learning_rate > 5 * RATE
    _, rows, found = run()
    assert rows["bad"]["tokens"]["bound"] == "≤ " and rows["late"]["tokens"]["bound"] == ""
    assert rows["bad"]["verdict"] == "diverges on 8 seeds" and not rows["bad"]["kept"]
    assert rows["late"]["verdict"] == "holds" and rows["late"]["lr_factor"] == 4  # not 8, which diverges
    assert {row["note"] for row in found if row["val_loss"] is None} == {"diverged: stopped at step 3"}


@pytest.mark.slow
def test_a_trial_that_failed_is_tried_again_by_the_next_command(world, run):
    world.most, world.fails = 3, 1
    failed = run()[2]
    world.most = None
    _, rows, found = run()
    assert rows["late"]["verdict"] == "holds"
    again = next(row for row in found if (row["name"], row["seed"], row["lr_factor"]) == ("base", 0, 0.5))
    assert failed[0]["note"] == "failed: no room" and again["val_loss"]


@pytest.mark.slow
def test_a_bound_is_not_a_verdict(world, run, monkeypatch):
    monkeypatch.setitem(WORTH, "good", 3.0)
    world.short = lambda config: 2.0 * (config.optimizer == "muon" and config.max_steps < 400)
    rows = run()[1]
    for name, true in (("good", 3.0), ("late", 3.6)):
        assert rows[name]["tokens"]["bound"] == "≤ "
        assert rows[name]["tokens"]["times"] == pytest.approx(0.5 * true, rel=0.02)
        assert rows[name]["verdict"] == "beyond the curve"


def test_a_recipe_is_only_known_to_be_better_than_what_ends_beyond_the_curve(world, run):
    world.short = lambda config: 2.0 * (config.optimizer != "muon" and config.weight_decay == 0.2)
    row = run("--kept=good,late")[1]["good"]
    assert row["without"]["bound"] == "≥ " and row["without"]["times"] == pytest.approx(1 / 0.25, rel=0.02)


def test_what_cannot_be_measured_is_refused_in_one_line(world, run):
    world.rungs = RUNGS | {"late": {"n_head": 5}}
    done, _, rows = run()
    assert done.code == 2 and done.err.startswith("error: --mode=recipe: base + late: ") and not rows
    assert run("--on=good", "--kept=good,late")[0].err.startswith("error: --kept=good: --on has it")
    world.rungs, world.diverges = RUNGS, lambda config: True
    assert "a run of the base" in run()[0].err


@pytest.mark.slow
def test_a_trial_trains_as_train_py_does(dense, tmp_path):
    config = tiny(dataset=str(dense), eval_interval=6, out_dir=str(tmp_path / "run"), save_interval=0)
    train.train(config)
    expected = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["val_loss"]
    other = tmp_path / "other.py"
    other.write_text("raise SystemExit('error: no such model')")
    for learning_rate, script, note in (
        (config.learning_rate, training.ROOT / "train.py", ""),
        (1e18, training.ROOT / "train.py", "diverged: stopped at step"),
        (config.learning_rate, other, "failed: no such model"),
    ):
        row = recipe.row_of(TrainingRun("", replace(config, learning_rate=learning_rate), config.seed))
        with training.Child(cli.command_line(row["keys"]), recipe.ONE_THREAD, script) as child:
            while not (outcome := child.outcome()):
                time.sleep(0.1)
        assert outcome["val_loss"] == (None if note else expected)
        assert (outcome["note"] or "").startswith(note) and outcome["failed"] == ("failed" in note)
        assert not Path(child.folder.name).exists()


def test_by_loss_finds_what_planted_rungs_save_at_every_length_and_resumes(
    world, dense, tmp_path, run_main, monkeypatch
):
    monkeypatch.setattr(by_loss, "tree", lambda _: TREE)
    words = [*flags(dataset=dense, max_steps=STEPS, learning_rate=RATE, min_lr=RATE / 10), "--mode=by_loss"]
    words.append(f"--out_dir={tmp_path}")
    world.most = 40
    with pytest.raises(KeyboardInterrupt):
        modes.main(words)
    world.most = None
    done = run_main(modes.main, *words)
    configs = [str(config) for config in world.configs]
    assert len(configs) <= len({*configs}) + 2  # those that ran when it was interrupted
    report, _ = (tmp_path / "by_loss.md").read_text(), (tmp_path / "by_loss.png").read_bytes()
    assert "written" in done.out and "trigrams and copies" in report
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("| ")]
    found = {name: [[*map(float, re.findall(r"[0-9.]+", cell))] for cell in cells] for name, *cells, _ in rows[2:]}
    worth = {f"without {name}": WORTH[name] for name in ("good", "nothing", "late")} | {
        "with bad": WORTH["bad"],
        "base": 1.8,
    }
    assert found.keys() == worth.keys()
    for name, cells in found.items():
        assert len(cells) == 3
        for middle, low, high in cells:
            assert low <= middle <= high and abs(middle / worth[name] - 1) < 0.02, (name, cells)


def test_by_loss_measures_only_the_rungs_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(by_loss, "tree", lambda _: TREE)
    protocol = by_loss.ByLoss(tiny(), RUNGS, loss=None, only=["bad", "late"])
    assert [row.name for row in protocol.rows] == ["without late", "with bad", "base"]


def test_by_loss_measures_the_recipe_up_to_a_rung_and_adds_the_rungs_above_it(monkeypatch):
    monkeypatch.setattr(by_loss, "stage_path", {"nothing": ["base", "good", "nothing"]}.get)
    protocol = by_loss.ByLoss(tiny(), RUNGS, loss=None, top="nothing")
    assert [row.name for row in protocol.rows] == ["without good", "without nothing", "with bad", "with late", "base"]
    assert protocol.recipe.config.optimizer == "muon" and protocol.recipe.config.weight_decay != 0.2
    assert protocol.rows[3].config.weight_decay == 0.2


def test_by_loss_counts_a_run_that_diverged_as_the_end_of_the_curve(monkeypatch, tmp_path):
    monkeypatch.setattr(by_loss, "tree", lambda _: [("", name) for name in ("base", "good")])
    rungs = {name: RUNGS[name] for name in ("base", "good")}

    def loss(run):
        diverged = (run.name, run.seed, run.length) == ("without good", 10, 1.0)
        return (
            math.inf
            if diverged
            else 3.0 - math.log(run.length) / 10 + abs(math.log(run.factor)) + run.name.count("out")
        )

    protocol = by_loss.ByLoss(tiny(), rungs, loss).follow()
    assert not protocol.wanted
    gains, bound = protocol.gains(protocol.rows[0], 1.0)
    assert gains[10] == pytest.approx(math.log(32)) and bound == "≥ "


def test_by_loss_bounds_gains_by_the_known_part_of_the_curve_and_bounds_say_nothing_of_noise(monkeypatch):
    monkeypatch.setattr(by_loss, "tree", lambda _: [("", name) for name in RUNGS])

    def loss(run):
        better = 0.1 if run.name == "without nothing" else -1.0 if run.name == "base" else 0.0
        if run.seed == 0 or run.length <= 1 / 16:
            return 3.0 - math.log(run.length) / 10 - better + abs(math.log(run.factor)) + 0.001 * (run.seed % 2)
        return None

    gains = by_loss.gains_at(by_loss.ByLoss(tiny(), RUNGS, loss).follow(), 1 / 16)
    assert gains["without nothing"] == {"bound": "≤ ", "times": pytest.approx(1.0)}
    assert gains["base"] == {"bound": "≥ ", "times": pytest.approx(2.0)}
