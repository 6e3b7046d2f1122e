"""Bad input of the lab's commands is one line that says what was expected."""

import pytest
from conftest import flags

from lab import advise, climb, cluster, replay

JUDGE, PEERS, ADVICE = ["--mode=judge"], ["--mode=peers"], ["savings", "--available_bytes=9"]
REFUSED = [
    (advise.main, [], "required: question, --available_bytes"),
    (advise.main, ["peaks", "--available_bytes=9"], "invalid choice: 'peaks'"),
    (advise.main, [*ADVICE, "--world_size=3"], "does not divide among 3 processes"),
    (advise.main, [*ADVICE, "--device=mps"], "device=mps"),
    (cluster.main, [], "vocab_size=0"),
    (cluster.main, ["--vocab_size=257", "--memory_gb=1e-6"], "no layout of batch_size=4 fits 1e-06 GB"),
    (cluster.main, ["--vocab_size=257", "--gpus=many"], "--gpus"),
    (cluster.main, ["--vocab_size=257", "--gpu=8"], "unknown key 'gpu', did you mean 'gpus'"),
    (cluster.main, ["--vocab_size=257", "--gpus=-8"], "--gpus=-8: expected at least 1"),
    (replay.main, [], "required: --step"),
    (replay.main, ["--step=7"], "--step=7: not a step of this run; expected 1 to max_steps=6"),
    (replay.main, ["--step=0"], "--step=0: not a step of this run"),
    (replay.main, ["--step=seven"], "invalid int value: 'seven'"),
    (replay.main, ["--step=3", "--steps=3"], "unknown key 'steps', did you mean 'step'?"),
    (climb.main, JUDGE, "expected another version, --against=COMMIT, or a change, --patch=FILE"),
    (climb.main, [*JUDGE, "--against=HEAD", "--dropout=0.1"], "expected --dropout=0"),
    (climb.main, [*JUDGE, "--against=HEAD", "--metric=time"], "unknown 'time'; expected speed, memory, loss"),
    (climb.main, [*JUDGE, "--against=HEAD", "--rounds=5"], "expected a whole number of at least 6"),
    (climb.main, [*JUDGE, "--against=HEAD", "--steps=5"], "--mode=judge does not use it"),
    (climb.main, ["--against=HEAD"], "--against: --mode=ladder does not use it"),
    (climb.main, [*PEERS, "--nanogpt=/nowhere"], "--nanogpt=/nowhere: no train.py there; expected a checkout"),
    (climb.main, [*PEERS, "--dropout=0.1"], "dropout=0.1: not every peer can train so; expected --dropout=0.0"),
    (climb.main, [*PEERS, "--optimizer=muon"], "not every peer can train so; expected --optimizer=adamw"),
    (climb.main, [*PEERS, "--stage=amp"], "stage=amp: not every peer can train so; expected no stage"),
    (climb.main, [*PEERS, "--micro_batch_size=2", "--batch_size=4"], "every peer takes a batch at once"),
    (climb.main, [*PEERS, "--train_steps=3"], "--train_steps: --mode=peers does not use it"),
]


@pytest.mark.parametrize(("main", "argv", "fragment"), REFUSED)
def test_bad_input_is_one_line(main, argv, fragment, dense, refused):
    words = flags(dataset=dense)
    assert fragment in refused(main, *argv[:1], *words, *argv[1:])
