"""Bad input of the lab's commands is one line that says what was expected, before anything is measured."""

import pytest
import torch
from conftest import MACHINE, flags

from lab import replay
from lab.measure import modes
from lab.predict import cluster

JUDGE, PEERS = "--mode=judge", "--mode=peers"
REFUSED = [
    (cluster.main, "", "vocab_size=0"),
    (cluster.main, "--vocab_size=257 --memory_gb=1e-6", "no layout of batch_size=4 fits 1e-06 GB"),
    (cluster.main, "--vocab_size=257 --gpu=8", "unknown key 'gpu', did you mean 'gpus'"),
    (cluster.main, "--vocab_size=257 --gpus=-8", "--gpus: -8: expected a whole number of at least 1"),
    (replay.main, "", "required: --step"),
    (replay.main, "--step=7", "--step=7: not a step of this run; expected 1 to max_steps=6"),
    (replay.main, "--step=0", "--step=0: not a step of this run"),
    (replay.main, "--step=seven", "expected a whole number, not 'seven'"),
    (replay.main, "--step=3 --steps=3", "unknown key 'steps', did you mean 'step'?"),
    (modes.main, JUDGE, "expected another version, --against=COMMIT"),
    (modes.main, f"{JUDGE} --against=HEAD --dropout=0.1", "expected --dropout=0"),
    (modes.main, f"{JUDGE} --against=HEAD --metric=time", "unknown 'time'; expected speed, memory, loss"),
    (modes.main, f"{JUDGE} --against=HEAD --rounds=5", "expected a whole number of at least 6"),
    (modes.main, f"{JUDGE} --against=HEAD --minutes=5", "--mode=judge does not use it"),
    (modes.main, "--against=HEAD", "--against: --mode=ladder does not use it"),
    (modes.main, "--mode=recipe --rounds=6", "--rounds: --mode=recipe does not use it"),
    (modes.main, f"{PEERS} --nanogpt=/nowhere", "--nanogpt=/nowhere: no train.py there; expected a checkout"),
    (modes.main, f"{PEERS} --dropout=0.1", "dropout=0.1: not every peer supports it; expected --dropout=0.0"),
    (modes.main, "--stages=naive,flsh", "did you mean 'flash'?"),
    (modes.main, "--minutes=0", "expected a positive number"),
    (modes.main, "--minutes=x", "expected a positive number"),
    (modes.main, "--mode=scaling", "such as --processes=2"),
    (modes.main, "--mode=scaling --processes=2 --dimension=model", "expected data, shard, tensor"),
    (modes.main, "--no_such_key=1", "unknown key 'no_such_key'"),
    (modes.main, "--modes=judge", "did you mean 'mode'?; --help lists every key"),
    (modes.main, "--out-dir=x", "did you mean 'out_dir'?"),
    (modes.main, "--mode=each", "expected ladder, vary"),
    (modes.main, "--stage=amp", "--mode=ladder sets it"),
    (modes.main, "--recipe=muon --mode=recipe", "expected no --recipe"),
    (modes.main, "--vary stage=amp,flash", "expected stages, or KEY=a,b,c"),
    (modes.main, "--micro_batch_size=auto", "micro_batch_size=auto is resolved when training starts"),
    (modes.main, "--vary micro_batch_size=2,auto", "auto is resolved when training starts; expected numbers"),
    (modes.main, "--out_dir=/dev/null/x", "cannot be written"),
    (modes.main, "--vary attention=sdpa config/gpt2.py", "config/gpt2.py: expected stages, or KEY=a,b,c (config files"),
    (modes.main, "--vary attn=sdpa", "unknown key 'attn'"),
    (modes.main, "--vary attention=fast", "attention"),
    (modes.main, "--vary attention=sdpa stages", "--vary=stages alone"),
    (modes.main, "--mode=vary", "expected --vary KEY=a,b,c"),
    (modes.main, "--mode=judge --vary=stages", "--vary: --mode=judge does not use it; expected --mode=vary|predict"),
    (modes.main, "--mode=predict --mfu=40", "expected a fraction"),
    (modes.main, "--mode=predict --vary=stages", "each stage is a row without --vary=stages"),
    (modes.main, "--mode=predict --vocab_size=50 --device=cuda --gpu=H1000", "no such device, did you mean 'H100'"),
    (modes.main, "--mode=predict --vocab_size=50 --gpu=H100", "expected --device=cuda"),
    (modes.main, "--mode=predict --vocab_size=50 --device=mps", "expected one of them"),
    (modes.main, "--mode=predict --dataset=nowhere", "or, to predict without the data, --vocab_size=NUMBER"),
]


@pytest.mark.parametrize(("main", "words", "fragment"), REFUSED)
def test_bad_input_is_one_line(main, words, fragment, dense, refused, monkeypatch):
    monkeypatch.setattr(modes, "run_alone", lambda *_: MACHINE)
    monkeypatch.setattr(modes, "take", lambda *_: pytest.fail("measured"))
    assert fragment in refused(main, *flags(dataset=dense), *words.split())


def test_torchrun_is_refused(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "expected `python profile.py config/x.py --mode=scaling --processes=N`" in refused(modes.main)


@pytest.mark.parametrize("mode", ["ladder", "judge", "peers"])
def test_a_device_that_reports_no_memory_is_refused(mode, dense, monkeypatch, refused):
    monkeypatch.setattr(modes, "choose_device", lambda _: torch.device("mps"))
    line = refused(modes.main, *flags(dataset=dense), f"--mode={mode}")
    assert "device=mps cannot be measured; expected --device=cpu" in line
