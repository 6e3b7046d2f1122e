"""--mode=race trains three configs to their end, seed by seed, and says how much sooner each ends with naive's loss."""

import json

import pytest
from conftest import flags, tiny

from lab import climb, race
from nanoladder.run import load_config

SECONDS = {"naive": 120.0, "loop": 40.0, "both": 10.0}


class Player:
    """Plays a Child: the recipe ends with a lower loss, except where `missed` says otherwise."""

    runs, missed, most = [], (), None

    def __init__(self, words, environment):
        if len(self.runs) == self.most:
            raise KeyboardInterrupt
        assert environment["TORCHINDUCTOR_CACHE_DIR"]
        config = load_config(words)
        self.start, self.looks = 0.0, 2
        self.name = "both" if config.optimizer == "muon" else "naive" if config.attention == "matmul" else "loop"
        self.bpb = 2.1 if self.name != "both" else 2.11 if config.seed in self.missed else 2.0
        self.runs.append(config)

    def metrics(self):
        return [{"step": 1, "train_loss": 6.0}, {"step": 2, "val_loss": 4.2, "val_bpb": 2.1}]

    def outcome(self):
        self.looks -= 1
        losses = {"val_loss": 2 * self.bpb, "val_bpb": self.bpb, "tokens": 384}
        return None if self.looks else {"seconds": SECONDS[self.name], "note": None, **losses}

    def end(self):
        pass


@pytest.fixture
def run(dense, tmp_path, run_main, monkeypatch):
    """run(**changes) runs --mode=race of a config with Muon against one without, in no time."""
    monkeypatch.setattr(race, "Child", Player)
    monkeypatch.setattr(race, "PAUSE", 0.0)
    for name, value in {"runs": [], "missed": (), "most": None}.items():
        monkeypatch.setattr(Player, name, value)

    def run(**changes):
        other = tiny(**{"dataset": str(dense), "attention": "sdpa", **changes})
        file = tmp_path / "other.py"
        file.write_text("\n".join(f"{key} = {value!r}" for key, value in vars(other).items()))
        options = "--mode=race", f"--against={file}", "--seeds=3", f"--out_dir={tmp_path}"
        return run_main(climb.main, *flags(dataset=dense), "--optimizer=muon", *options)

    return run


def test_each_seed_s_runs_are_compared_and_none_is_run_twice(run, tmp_path):
    Player.most = 4
    assert run().code == 130 and len(json.loads((tmp_path / "race.json").read_text())["runs"]) == 4
    Player.most = None
    done = run()
    assert done.code == 0 and "12.00× (12.00–12.00)" in done.out and "3.00× (3.00–3.00)" in done.out
    assert done.out.count("reached by every seed") == 3 and (tmp_path / "race.png").stat().st_size > 1e4
    assert [config.seed for config in Player.runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    outcome = json.loads((tmp_path / "race.json").read_text())["runs"]
    assert [loss for _, loss in outcome[2]["curve"]] == [3.0, 2.0] and outcome[2]["curve"][-1][0] == 10.0
    assert run().out == done.out and len(Player.runs) == 9


def test_a_loss_that_is_missed_is_said(run):
    Player.missed = (1,)
    assert "missed with seed 1" in run().out


def test_what_cannot_be_compared_is_refused_in_one_line(run, refused, dense):
    result = run(eval_windows=3)
    assert result.code == 2 and "eval_windows=3" in result.err and "expected the same validation" in result.err
    assert "--against=config/y.py" in refused(climb.main, *flags(dataset=dense), "--mode=race")
