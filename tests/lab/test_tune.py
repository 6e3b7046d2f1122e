"""--mode=tune finds the fastest config within its time, and computes nothing else."""

import ast
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import MACHINE, flags

from lab import launch, modes, pages, tune
from nanoladder.run import load_config

LOSSES = [5.0, 4.0, 3.0, 2.0, 1.0]
FINISHED = {"attention": "sdpa", "dtype": "auto", "num_workers": 2, "adamw_impl": "fused", "keep_memory": True}


class World:
    """A machine in place of this one: its clock, and processes whose steps take seconds(config), give or take noise."""

    def __init__(self, monkeypatch, seconds, losses=lambda config: LOSSES, noise=0.004, start=8.0):
        self.now, self.alive, self.started, self.room = 0.0, 0, [], 2
        self.seconds, self.losses, self.start = seconds, losses, start
        self.random, self.noise = random.Random(1), noise
        monkeypatch.setattr(tune, "Child", lambda function, config: Player(self, config))
        monkeypatch.setattr(tune, "monotonic", lambda: self.now)
        monkeypatch.setattr(tune.predict, "predict_memory", lambda *_: SimpleNamespace(peak=0))
        monkeypatch.setattr(modes, "run_alone", lambda *_: MACHINE)
        monkeypatch.setattr("nanoladder.files.write", lambda path, text: Path(path).write_text(text))  # without a sync

    def wait(self, seconds, limit):
        self.now += min(seconds, max(0.0, limit))
        if seconds > limit:
            raise launch.TimeUp


class Player:
    """Plays a Child that takes turns."""

    def __init__(self, world, config):
        self.world, self.config = world, config
        world.alive += 1
        world.started.append(config)

    def receive(self, limit):
        if self.world.alive > self.world.room:
            raise RuntimeError("CUDA out of memory")
        self.world.wait(self.world.start, limit)
        self.world.seconds(self.config)  # fails if the config does
        return self.world.losses(self.config)

    def ask(self, limit):
        noise = abs(self.world.random.gauss(0, self.world.noise)) + 0.1 * (self.world.random.random() < 0.02)
        seconds = self.world.seconds(self.config) * (1 + noise)
        self.world.wait(seconds * math.ceil(1 / seconds), limit)
        return seconds

    def end(self):
        self.world.alive -= 1


@pytest.fixture
def tuning(monkeypatch, dense, tmp_path):
    """tuning(*words, **config) runs profile.py --mode=tune. Returns the races of tune.json, and the config written."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("n_layer = 1\n")

    def run(*words, **config):
        own = ["x.py", *flags(**{**FINISHED, "dataset": dense, "batch_size": 16, **config})]
        modes.main([*own, "--mode=tune", "--out_dir=out", *words])
        path = Path("out/tuned.py")
        written = {}
        if path.exists():
            for statement in ast.parse(path.read_text()).body[1:]:
                written[statement.targets[0].id] = ast.literal_eval(statement.value)
            load_config(["x.py", str(path), "--batch_size=16"])
            assert written
        return json.loads(Path("out/tune.json").read_text())["races"], written

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


def changes(races, outcome):
    return [race["change"] for race in races if race["outcome"] == outcome]


def test_the_planted_best_is_found_and_written_as_a_config(tuning, monkeypatch, capsys):
    world = World(monkeypatch, planted)
    _, written = tuning("--minutes=60")
    assert world.alive == 0
    assert written == {"attention": "matmul", "micro_batch_size": 4, "num_workers": 0, "compile": True}
    out = " ".join(capsys.readouterr().out.split())
    text = " ".join(Path("out/tuned.py").read_text().split())  # without its line breaks
    verdict = re.search(r"(\S+)× \(\S+\) as fast as the finished loop, .*: num_workers=0, ", out)
    assert float(verdict[1]) == pytest.approx(1.0 * 1.06 * 1.1 / 0.7, rel=0.02)
    assert all(part in text for part in ("a CPU, 4 threads", "torch 2.13", f"{verdict[1]}× ", "ms a step and not"))
    assert 'attention = "matmul" # 1.0' in text
    assert ". attention=matmul" in out


def test_the_time_is_kept(tuning, monkeypatch):
    world = World(monkeypatch, planted, start=20.0)
    races, _ = tuning("--minutes=4")
    assert 180 <= world.now <= 240 and races and world.alive == 0


def test_other_losses_and_a_config_that_fails_are_refused_however_fast(tuning, monkeypatch, capsys):
    def losses(config):
        return [5.0, 4.0, 3.0, 2.02, 1.0] if config.attention == "matmul" else [loss + 0.004 for loss in LOSSES]

    def seconds(config):
        if config.attention == "blocks":
            raise RuntimeError("ValueError: boom")
        return planted(config)

    world = World(monkeypatch, seconds, losses)
    races, written = tuning("--minutes=30")
    assert "attention" not in written and written["num_workers"] == 0 and world.alive == 0
    reasons = ["WRONG: losses differ from step 4 (2.0200 instead of 2.0040)", "ValueError: boom"]
    assert [race["note"] for race in races if race["outcome"] == "failed"][:2] == reasons
    out = " ".join(capsys.readouterr().out.split())
    assert all(reason in out for reason in reasons)


def test_two_processes_that_do_not_fit_take_turns_one_at_a_time(tuning, monkeypatch):
    world = World(monkeypatch, planted)
    world.room = 1
    races, written = tuning("--minutes=300")
    assert written == {"attention": "matmul", "micro_batch_size": 4, "num_workers": 0, "compile": True}
    assert not changes(races, "failed")


def test_no_more_memory_is_taken_than_is_free_on_a_cpu(tuning, monkeypatch):
    def peak(config):
        return 1e9 * (config.micro_batch_size or config.batch_size)

    world = World(monkeypatch, lambda config: 2 - (config.micro_batch_size or 8) / 16)
    monkeypatch.setattr(tune.predict, "predict_memory", lambda config: SimpleNamespace(peak=peak(config)))
    monkeypatch.setattr(tune.machine, "free_memory", lambda _: 4.5e9)
    races, _ = tuning("--minutes=30", micro_batch_size=4)
    assert all(peak(config) <= 4.5e9 for config in world.started) and len(world.started) < 2 * len(races)
    assert "out of memory: 8.00 GB predicted, 4.50 GB free" in [race["note"] for race in races]


def test_a_gain_that_is_gone_in_the_end_is_not_written(tuning, monkeypatch, capsys):
    def seconds(config):
        fast = config.attention == "matmul" and world.now < 400
        return 0.8 if fast else 1.0

    world = World(monkeypatch, seconds, noise=0.01)
    races, written = tuning("--minutes=10")
    assert changes(races, "kept") == [{"attention": "matmul"}]
    out = " ".join(capsys.readouterr().out.split())
    assert written == {} and not Path("out/tuned.py").exists() and "use: " not in out
    assert re.search(r"tuned loop is not seen to be faster .*: the config as it is\.", out)


def test_equal_changes_are_seldom_kept_and_small_gains_are():
    kept = {}
    for gain in (0.0, 0.03):
        kept[gain] = 0
        for seed in range(300):
            draw, gains, outcome = random.Random(seed), [], None
            while outcome is None:
                gains.append(gain + draw.gauss(0, 0.01) - draw.gauss(0, 0.01))
                outcome = tune.decide(gains)
            kept[gain] += outcome == "kept"
    assert kept[0.0] <= 0.05 * 300 and kept[0.03] >= 0.75 * 300


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


def test_on_a_gpu_memory_is_not_predicted(monkeypatch, dense, tmp_path):
    monkeypatch.chdir(tmp_path)
    world = World(monkeypatch, lambda config: 0.5 if config.attention == "flash" else 1.0)
    gpu = {**MACHINE, "gpu": "a GPU"}
    monkeypatch.setattr(modes, "run_alone", lambda *_: gpu)
    monkeypatch.setattr(tune.predict, "predict_memory", lambda *_: pytest.fail("it takes seconds"))
    words = [*flags(**{**FINISHED, "dataset": dense, "batch_size": 16, "set_to_none": True}), "--mode=tune"]
    modes.main([*words, "--minutes=4", "--out_dir=out"])
    assert world.started[1].attention == "flash"
    assert 'attention = "flash"' in Path("out/tuned.py").read_text()


def test_values_are_those_of_the_machine_and_micro_batches_half_and_twice_the_size():
    def values(machine):
        found = {}
        for change in tune.candidates(config, machine):
            *_, (key, value) = change.items()
            found.setdefault(key, []).append(value)
        return found

    config = load_config(["--batch_size=12", "--micro_batch_size=3", "--vocab_size=256", "--num_workers=1"])
    old = values({**MACHINE, "native_bfloat16": False})
    assert old["attention"] == ["matmul", "sdpa", "blocks"] and old["micro_batch_size"] == [1, 6]
    assert not {"dtype", "pad_vocab_to"} & old.keys()  # it is float32, and the others are emulated; all make 256
    gpu = values({**MACHINE, "gpu": "a GPU"})
    assert gpu["dtype"] == ["float16", "float32"]


# -- bad input


def test_bad_input_is_one_line(tuning, refused, dense, monkeypatch):
    World(monkeypatch, planted)
    words = ["x.py", *flags(**{**FINISHED, "dataset": dense, "batch_size": 16}), "--mode=tune", "--out_dir=out"]
    for more, message in {
        "--minutes=-3": "expected a positive number",
        "--stage=amp": "expected no --stage",
        "--minutes=0.1": "expected more --minutes",
        "--dropout=0.1": "expected --dropout=0",
        "--micro_batch_size=auto": "micro_batch_size=auto is resolved when training starts",
    }.items():
        assert message in refused(modes.main, *words, more), more
