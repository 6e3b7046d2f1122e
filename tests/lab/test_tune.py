"""--mode=tune finds the fastest config within its time, computes nothing else, and goes on after an interruption."""

import ast
import json
import math
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from conftest import ROOT, flags, replace, tiny

from lab import climb, pages, rounds, search_space, tune, tuned, turns
from nanoladder.config import TYPES
from nanoladder.run import load_config

MACHINE = {
    **{"cpu": "a CPU", "threads": 4, "native_bfloat16": True, "gpu": None, "gpus": 0, "cuda": None},
    **{"torch": "2.13", "python": "3.12"},
}
FOLDER = Path("config/tuned/a-cpu-4-threads-bf16")
LOSSES = [5.0, 4.0, 3.0, 2.0, 1.0]
FINISHED = {"attention": "sdpa", "dtype": "auto", "num_workers": 2, "adamw_impl": "fused", "keep_memory": True}


class World:
    """A machine in place of this one: its clock, and processes whose steps take seconds(config), give or take noise."""

    def __init__(
        self, monkeypatch, seconds, losses=lambda config: LOSSES, noise=0.004, start=8.0, peak=lambda config: 0
    ):
        self.now, self.alive, self.started, self.turns = 0.0, 0, [], []
        self.interrupted, self.room = None, 2
        self.seconds, self.losses, self.start, self.peak = seconds, losses, start, peak
        self.random, self.noise = random.Random(1), noise
        monkeypatch.setattr(turns, "Worker", lambda config, limit: Player(self, config, limit))
        for module in (tune, turns):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(tune.predict, "predict_memory", lambda config, *_: SimpleNamespace(peak=peak(config)))
        monkeypatch.setattr(climb, "run_alone", lambda *_: MACHINE)
        monkeypatch.setattr(tuned.files, "write", lambda path, text: Path(path).write_text(text))  # without a sync

    def wait(self, seconds, limit):
        self.now += min(seconds, max(0.0, limit))
        if seconds > limit:
            raise turns.TimeUp


class Player:
    """Plays a Worker."""

    def __init__(self, world, config, limit):
        self.world, self.config = world, config
        if world.alive == world.room:
            raise RuntimeError("CUDA out of memory")
        world.started.append(config)
        world.wait(world.start(config) if callable(world.start) else world.start, limit)
        self.seconds, self.losses = self.step(), world.losses(config)
        world.alive += 1

    def step(self):
        noise = abs(self.world.random.gauss(0, self.world.noise))
        return self.world.seconds(self.config) * (1 + noise + 0.1 * (self.world.random.random() < 0.02))

    def turn(self, limit):
        if len(self.world.turns) == self.world.interrupted:
            raise KeyboardInterrupt
        seconds = self.step()
        self.world.turns.append(self.config)
        self.world.wait(seconds * math.ceil(1 / seconds), limit)
        self.seconds = seconds
        return seconds

    def end(self):
        self.world.alive -= 1


@pytest.fixture
def tuning(monkeypatch, dense, tmp_path):
    """tuning(*words, **config) runs profile.py --mode=tune. Returns tune.json, and the config written, or {}."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("n_layer = 1\n")

    def run(*words, **config):
        own = ["x.py", *flags(**{**FINISHED, "dataset": dense, "batch_size": 16, **config})]
        climb.main([*own, "--mode=tune", "--out_dir=out", *words])
        path = tuned.config_path(MACHINE, own, "config/tuned")
        written = {}
        if path.exists():
            for statement in ast.parse(path.read_text()).body[1:]:
                written[statement.targets[0].id] = ast.literal_eval(statement.value)
            load_config(["x.py", str(path), "--batch_size=16"])
            assert written
        return json.loads(Path("out/tune.json").read_text()), written

    return run


def planted(config):
    """Seconds of a step that are least in micro-batches of 4, which matmul alone gains from, without workers."""
    seconds = 2.0 if config.dtype == "float32" else 1.0
    size = config.micro_batch_size or config.batch_size
    if config.attention == "matmul":
        seconds *= {4: 0.7, 8: 0.8, 16: 0.95}.get(size, 1.2)
    else:
        seconds *= 1 + 0.01 * (16 - size)
    return seconds * (1 + 0.03 * config.num_workers) * (1 if config.compile else 1.1)


def names(results, outcome):
    return [tuned.name(race) for race in results["races"] if race["outcome"] == outcome]


def test_the_planted_best_is_found_and_written_as_a_config(tuning, monkeypatch, capsys):
    World(monkeypatch, planted)
    _, written = tuning("--minutes=60")
    assert written == {"attention": "matmul", "micro_batch_size": 4, "num_workers": 0, "compile": True}
    out = capsys.readouterr().out
    text = " ".join(next(FOLDER.iterdir()).read_text().split())  # without its line breaks
    verdict = re.search(r"^(\S+)× \(\S+\) as fast as the finished loop: attention=matmul, ", out, re.MULTILINE)
    assert float(verdict[1]) == pytest.approx(1.0 * 1.06 * 1.1 / 0.7, rel=0.02)
    assert out.index(verdict[0]) < out.index("| attention=matmul")
    assert all(part in text for part in ("a CPU, 4 threads", "torch 2.13", f"{verdict[1]}× ", "ms a step, finished"))
    assert 'attention = "matmul" # 1.0' in text
    assert "| attention=matmul" in Path("out/tune.md").read_text()


def test_losers_are_dropped_early_and_winners_need_the_statistics(tuning, monkeypatch):
    world = World(monkeypatch, planted)
    results, _ = tuning("--minutes=30")
    taken = {outcome: {} for outcome in ("kept", "slower", "no gain")}
    for race in results["races"]:
        taken[race["outcome"]][tuned.name(race)] = len(race["rounds"])
    assert taken["slower"]["dtype=float32"] == 0  # clear in the first steps
    assert max(taken["slower"].values()) <= 4
    assert min(taken["kept"].values()) >= 8
    assert world.alive == 0


@pytest.mark.parametrize("minutes", [2.7, 4, 8, 60])
def test_the_time_is_kept(minutes, tuning, monkeypatch):
    world = World(monkeypatch, planted, start=20.0)
    results, written = tuning(f"--minutes={minutes}")
    assert world.now / 60 <= minutes
    assert world.now / 60 > 0.4 * minutes or minutes == 60  # the search is over before
    assert results["spent"] == pytest.approx(world.now)
    text = Path("out/tune.md").read_text()
    assert ("Not tried for lack of time" in text) == (minutes < 60)
    assert bool(written) == bool(names(results, "kept"))  # there was time to confirm what was found


def test_a_compiler_has_a_minute_and_a_longer_one_costs_neither_the_others_nor_the_confirmation(tuning, monkeypatch):
    world = World(monkeypatch, planted, start=lambda config: 10_000 if config.compile else 8.0)
    results, written = tuning("--minutes=10")
    assert written == {"attention": "matmul", "micro_batch_size": 4, "num_workers": 0}
    assert {race["note"] for race in results["races"] if race["outcome"] == "failed"} == {"not ready after 90 s"}
    assert world.now <= 600 and results["confirmations"][0]["outcome"] == "kept"
    world = World(monkeypatch, planted, start=lambda config: 55 if config.attention == "matmul" else 8.0)
    _, written = tuning("--minutes=5", "--out_dir=short")
    assert written["attention"] == "matmul" and world.now <= 300


def test_an_interrupted_search_goes_on_to_the_same_answer(tuning, monkeypatch):
    whole = World(monkeypatch, planted, noise=0.0)
    expected = tuning("--minutes=60")[1]
    assert len(whole.turns) > 80
    Path("out/tune.json").unlink()
    for turn in (0, 5, 20, 40, 10):
        world = World(monkeypatch, planted, noise=0.0)
        world.interrupted = turn
        with pytest.raises(KeyboardInterrupt):
            tuning("--minutes=60")
        assert world.alive == 0
    world = World(monkeypatch, planted, noise=0.0)
    results, written = tuning("--minutes=60")
    assert written == expected
    assert len(world.turns) < len(whole.turns) - 60
    world = World(monkeypatch, planted)
    assert tuning("--minutes=60") == (results, written) and not world.started  # nothing is left to measure


def test_the_config_is_written_where_it_is_asked_for_and_other_words_write_another(tuning, monkeypatch, capsys):
    World(monkeypatch, planted)
    assert not tuning("--minutes=5", "--tuned_dir=elsewhere")[1]  # at the usual place, where the fixture looks
    (path,) = Path("elsewhere/a-cpu-4-threads-bf16").iterdir()
    assert load_config(["x.py", str(path)]).attention == "matmul"
    assert capsys.readouterr().out.splitlines()[-1].endswith(path.as_posix())
    World(monkeypatch, planted)
    tuning("--minutes=5", "--tuned_dir=elsewhere", "--out_dir=another", dtype="float32")
    assert len(list(path.parent.iterdir())) == 2


def test_more_minutes_continue_a_search(tuning, monkeypatch):
    World(monkeypatch, planted, start=20.0)
    less = tuning("--minutes=4")[0]
    World(monkeypatch, planted, start=20.0)
    more, written = tuning("--minutes=30")
    assert len(more["races"]) > len(less["races"]) and more["races"][0] == less["races"][0]
    assert written["micro_batch_size"] == 4


def test_other_losses_are_refused_however_fast(tuning, monkeypatch):
    def losses(config):
        return [5.0, 4.0, 3.0, 2.02, 1.0] if config.attention == "matmul" else [loss + 0.004 for loss in LOSSES]

    World(monkeypatch, planted, losses)
    results, written = tuning("--minutes=30")
    assert "attention" not in written and written["num_workers"] == 0
    failed = [race["note"] for race in results["races"] if race["outcome"] == "failed"]
    assert failed[0] == "WRONG: losses differ from step 4 (2.0200 instead of 2.0040)"
    assert "WRONG" in Path("out/tune.md").read_text()


def test_with_dropout_losses_are_compared_without(tuning, monkeypatch):
    seen = []

    def losses(config):
        seen.append(config.dropout)
        return LOSSES if config.dropout == 0 else [hash(config) % 100] * 5

    World(monkeypatch, planted, losses)
    results, written = tuning("--minutes=60", dropout=0.2)
    assert written["attention"] == "matmul" and "dropout" not in written
    assert not [note for note in (race["note"] for race in results["races"]) if note]
    assert set(seen) == {0.0, 0.2}


def test_a_config_that_fails_says_why_and_the_search_goes_on(tuning, monkeypatch):
    def seconds(config):
        if config.attention == "matmul":
            raise RuntimeError("CUDA out of memory")
        return planted(config)

    world = World(monkeypatch, seconds)
    results, written = tuning("--minutes=30")
    assert "attention" not in written and written["num_workers"] == 0
    assert results["races"][0]["note"] == "CUDA out of memory"
    assert "CUDA out of memory" in Path("out/tune.md").read_text()
    assert world.alive == 0


def test_after_a_failure_nothing_further_in_its_direction_is_tried(tuning, monkeypatch):
    def seconds(config):
        if 0 < config.micro_batch_size <= 8:
            raise RuntimeError("a bug of small micro-batches")
        return planted(config)

    World(monkeypatch, seconds)
    results, _ = tuning("--minutes=60")
    sizes = {race["change"]["micro_batch_size"] for race in results["races"] if "micro_batch_size" in race["change"]}
    assert sizes == {8}


def test_two_processes_that_do_not_fit_take_turns_one_at_a_time(tuning, monkeypatch):
    world = World(monkeypatch, planted)
    world.room = 1
    results, written = tuning("--minutes=300")
    assert written == {"attention": "matmul", "micro_batch_size": 4, "num_workers": 0, "compile": True}
    assert not names(results, "failed")


def test_a_config_that_does_not_even_fit_alone_leaves_the_others_beside_each_other(tuning, monkeypatch):
    def seconds(config):
        if config.dtype == "float32":
            raise RuntimeError("CUDA out of memory")
        return planted(config)

    world = World(monkeypatch, seconds, noise=0.0)
    results, _ = tuning("--minutes=60")
    assert names(results, "failed") == ["dtype=float32"]
    raced = [race for race in results["races"] if race["outcome"] != "failed"]
    assert len(world.started) < 2 * len(raced)  # had they been apart, each round would have started two


def test_no_more_memory_is_taken_than_is_free_on_a_cpu(tuning, monkeypatch):
    def peak(config):
        return 1e9 * (config.micro_batch_size or config.batch_size)

    world = World(monkeypatch, lambda config: 2 - (config.micro_batch_size or 8) / 16, peak=peak)
    monkeypatch.setattr(tune.machine, "free_memory", lambda _: 4.5e9)
    results, _ = tuning("--minutes=30", micro_batch_size=4)
    assert all(peak(config) <= 4.5e9 for config in world.started)
    assert "8.00 GB predicted, of 4.50 GB" in [race["note"] for race in results["races"]]


def test_a_gain_that_is_gone_in_the_end_is_not_written(tuning, monkeypatch, capsys):
    def seconds(config):
        fast = config.attention == "matmul" and world.now < 400
        return 0.8 if fast else 1.0

    world = World(monkeypatch, seconds, noise=0.01)
    results, written = tuning("--minutes=10")
    assert names(results, "kept") == ["attention=matmul"]
    out = " ".join(capsys.readouterr().out.split())
    assert written == {} and not list(FOLDER.glob("*")) and "use: " not in out
    assert re.search(r"tuned loop .*with the finished one.*: the config as it is\.", out)


def test_equal_changes_are_seldom_kept_and_small_gains_are():
    kept = {}
    for gain in (0.0, 0.03):
        kept[gain] = 0
        for seed in range(300):
            draw, changes, outcome = random.Random(seed), [], None
            while outcome is None:
                changes.append((1 - gain) * (1 + draw.gauss(0, 0.01)) / (1 + draw.gauss(0, 0.01)) - 1)
                outcome = rounds.decide(changes, tuned.SEARCH, drops=True)
            kept[gain] += outcome == "kept"
    assert kept[0.0] <= 0.05 * 300 and kept[0.03] >= 0.75 * 300


def test_the_name_of_a_tuned_config_says_the_words(monkeypatch):
    def name(*words):
        path = tuned.config_path(MACHINE, words, "config/tuned")
        assert path.parent == FOLDER and len(path.name) < 100 and path.suffix == ".py"
        return path.stem

    assert name("config/x.py") == name("config/x.py", "--device=cpu") == "x"
    assert name("--dtype", "float32", "config/x.py", "more.py", "--n_layer=2") == "x-more-dtype-float32-n_layer-2"
    assert name("--n_layer=2", "--dtype=float32") == name("--dtype=float32", "--n_layer=2") != name("--n_layer=2")
    folders = {name(f"--dataset={path}") for path in ("a-b", "a/b", "a b", "/a/b", "a" * 300, "a" * 301, "../a/b")}
    assert len(folders) == 7


# -- what is tried


def test_every_stage_of_speed_is_left_out_once(tuning, monkeypatch):
    """Stages that cost speed, and those that nothing is without a second process, are not in the finished loop."""
    naive = {field: ast.literal_eval(value) for field, value in pages.fields("naive").items()}
    asked = {"pad_vocab_to": 64, "compile": True, "loss_chunks": 2, "set_to_none": True, "lazy_metrics": True}
    world = World(monkeypatch, lambda config: 1.0)
    tuning("--minutes=60", **asked, matmul_precision="high")
    stages = [field for stage in pages.stage_names()[1:13] for field in pages.fields(stage)]
    assert len(stages) == 12
    for field in stages:
        assert any(getattr(config, field) == naive[field] for config in world.started), field


def test_values_are_those_that_config_declares(monkeypatch):
    monkeypatch.setitem(TYPES, "attention", Literal["matmul", "sdpa", "flash", "novel"])
    config = load_config([])
    cpu, gpu = (search_space.Machine(on_gpu, True, 2) for on_gpu in (False, True))
    assert [way[0]["attention"] for way in search_space.attention(config, cpu)] == ["matmul", "sdpa", "novel"]
    assert [way[0]["attention"] for way in search_space.attention(config, gpu)] == ["sdpa", "flash", "novel", "matmul"]
    assert {way[0]["compile_mode"] for way in search_space.compile_modes(config, cpu)} == {
        "default",
        "max-autotune-no-cudagraphs",
    }
    old = search_space.Machine(False, False, 2)
    assert search_space.dtypes(config, old) == [[{"dtype": "float32"}]]  # emulated, the others take minutes


def test_on_a_gpu_graphs_come_first_and_memory_is_not_predicted(monkeypatch, dense, tmp_path):
    monkeypatch.chdir(tmp_path)
    world = World(monkeypatch, lambda config: 0.5 if config.compile_mode == "reduce-overhead" else 1.0)
    gpu = {**MACHINE, "gpu": "a GPU", "gpus": 1, "cuda": "13.0"}
    monkeypatch.setattr(climb, "run_alone", lambda *_: gpu)
    monkeypatch.setattr(tune.predict, "predict_memory", lambda *_: pytest.fail("it takes seconds"))
    words = [*flags(**{**FINISHED, "dataset": dense, "batch_size": 16, "set_to_none": True}), "--mode=tune"]
    climb.main([*words, "--minutes=4", "--out_dir=out"])
    assert world.started[1].compile_mode == "reduce-overhead"
    (path,) = Path("config/tuned/a-gpu").iterdir()
    assert 'compile_mode = "reduce-overhead"' in path.read_text()


@pytest.mark.parametrize(
    "total, now, down, up", [(16, 0, [8, 4, 2, 1], []), (60, 5, [2, 1], [10, 20, 0]), (1, 0, [], []), (7, 0, [1], [])]
)
def test_micro_batches_go_in_steps_of_two_or_more(total, now, down, up):
    config = load_config([f"--batch_size={total}", f"--micro_batch_size={now}"])
    ways = search_space.micro_batches(config, search_space.Machine(False, True, 2))
    assert [[change["micro_batch_size"] for change in way] for way in ways] == [down, up]


def test_configs_that_take_the_same_step_have_the_same_normal_form():
    machine = search_space.Machine(False, True, 2)

    def normal(*words):
        return search_space.normal(load_config(["--vocab_size=256", "--compile=False", *words]), machine)

    assert normal() == normal("--pad_vocab_to=1") == normal("--dtype=bfloat16") == normal("--compile_scope=block")
    assert normal() != normal("--dtype=float32") and normal() != normal("--pad_vocab_to=1000")
    assert normal() == normal("--attention=blocks") != normal("--attention=sdpa")
    short = "--dtype=float32", "--context_length=128"
    assert normal("--attention=auto", *short) == normal("--attention=sdpa", *short)
    assert normal("--optimizer=lion", "--adamw_impl=foreach") == normal("--optimizer=lion")


# -- bad input


def test_bad_input_is_one_line(refused, dense, monkeypatch, tmp_path):
    World(monkeypatch, planted, start=20.0)
    words = [*flags(dataset=dense, batch_size=16), "--mode=tune", f"--out_dir={tmp_path / 'out'}"]
    for more, message in {
        "--minutes=0": "expected a positive number",
        "--minutes=-3": "expected a positive number",
        "--memory_gb=0.5": "--mode=tune does not use it",
        "--stage=amp": "expected no --stage",
        "--minutes=0.1": "expected more minutes",
        "--minutes=0.9": "a step of the finished loop takes",
        "--micro_batch_size=auto": "micro_batch_size=auto is found when training starts",
        "--repeats=3": "--mode=tune does not use it",
    }.items():
        assert message in refused(climb.main, *words, more), more
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in refused(climb.main, *words)


def test_results_of_other_conditions_or_damaged_are_refused(tuning, monkeypatch, refused, dense):
    World(monkeypatch, planted)
    tuning("--minutes=5")
    words = ["x.py", *flags(**{**FINISHED, "dataset": dense, "batch_size": 16}), "--mode=tune", "--out_dir=out"]
    assert "measured under another config and keys" in refused(climb.main, *words, "--n_embd=64")
    monkeypatch.setattr(climb, "run_alone", lambda *_: {**MACHINE, "threads": 8})
    assert "another machine" in refused(climb.main, *words)
    monkeypatch.setattr(climb, "run_alone", lambda *_: MACHINE)
    assert all((ROOT / name).exists() for name in tune.CODE)
    with monkeypatch.context() as changed:
        changed.setattr(tune, "CODE", tune.CODE[1:])
        assert "measured under another code; choose another --out_dir" in refused(climb.main, *words)
    results = json.loads(Path("out/tune.json").read_text())
    Path("out/tune.json").write_text(json.dumps({key: results[key] for key in results if key != "code"}))
    assert "measured under another code; choose another --out_dir" in refused(climb.main, *words)
    Path("out/tune.json").write_text("{}")
    assert "out/tune.json is not a results file" in refused(climb.main, *words)


def test_a_loop_that_cannot_be_trained_is_bad_input(tuning, monkeypatch, refused, dense, tmp_path):
    def seconds(config):
        raise RuntimeError("no such kernel")

    World(monkeypatch, seconds)
    monkeypatch.chdir(tmp_path)
    words = [*flags(dataset=dense), "--mode=tune", "--out_dir=out"]
    assert "the finished loop cannot be measured: no such kernel" in refused(climb.main, *words)


# -- for real


@pytest.mark.slow
def test_a_worker_trains_answers_and_ends(dense):
    config = tiny(dataset=str(dense))
    first, second = turns.Worker(config, 120), turns.Worker(replace(config, adamw_impl="foreach"), 120)
    assert first.losses == pytest.approx(second.losses, abs=1e-3) and len(first.losses) == 5
    assert first.turn(60) > 0 and second.turn(60) > 0
    with pytest.raises(turns.TimeUp):
        first.turn(0)
    second.end()
    second.end()
    with pytest.raises(RuntimeError, match="no kernel for"):
        turns.Worker(replace(config, attention="cudnn"), 120)


@pytest.mark.slow
def test_a_worker_that_dies_while_it_waits_says_so(dense):
    worker = turns.Worker(tiny(dataset=str(dense)), 120)
    worker.child.kill()
    time.sleep(0.5)
    with pytest.raises(RuntimeError, match="killed by the system"):
        worker.turn(60)


def test_a_process_that_never_connects_is_not_waited_for(monkeypatch):
    ended = []
    silent = SimpleNamespace(kill=lambda: ended.append("killed"), finish=lambda: None)
    monkeypatch.setattr(turns.launch, "Child", lambda argv: silent)
    with pytest.raises(turns.TimeUp):
        turns.Worker(tiny(), 0.1)
    assert ended == ["killed"]


@pytest.mark.nightly
def test_a_search_for_real(dense, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = flags(dataset=dense, batch_size=8, num_workers=1)
    monkeypatch.setattr(tune, "SETTINGS", [one for one in search_space.SETTINGS if one.name == "num_workers"])
    climb.main([*words, "--mode=tune", "--minutes=4", "--out_dir=out"])
    results = json.loads(Path("out/tune.json").read_text())
    assert {"num_workers=0", "num_workers=2"} == {tuned.name(race) for race in results["races"]}
    assert not any(race["outcome"] == "failed" for race in results["races"])
    assert Path("out/tune.md").exists()
    assert "as fast as the finished loop" in (out := capsys.readouterr().out) or "seen to be faster" in out
