"""nanoGPT's command-line names: refused with the keys that mean the same, as docs/from-nanogpt.md lists them."""

import re

import pytest
from conftest import ROOT

from nanoladder.config import DEFAULTS, Config, nanogpt
from nanoladder.run import load_config

# Every setting of nanoGPT's train.py, in its order, with the value that it has there.
THEIRS = {
    "out_dir": "out",
    "eval_interval": 2000,
    "log_interval": 1,
    "eval_iters": 200,
    "eval_only": False,
    "always_save_checkpoint": True,
    "init_from": "scratch",
    "wandb_log": False,
    "wandb_project": "owt",
    "wandb_run_name": "gpt2",
    "dataset": "openwebtext",
    "gradient_accumulation_steps": 40,
    "batch_size": 12,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "dropout": 0.0,
    "bias": False,
    "learning_rate": 6e-4,
    "max_iters": 600000,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 2000,
    "lr_decay_iters": 600000,
    "min_lr": 6e-5,
    "backend": "nccl",
    "device": "cuda",
    "dtype": "bfloat16",
    "compile": True,
}


def keys_of(name, **given):
    """The keys here that mean the same as a name of nanoGPT's."""
    return nanogpt.KEYS[name](THEIRS | given)


def test_every_name_is_a_key_here_or_refused():
    assert {name for name in THEIRS if name not in DEFAULTS} == {name for name in nanogpt.NAMES if name not in DEFAULTS}
    assert nanogpt.NAMES.isdisjoint({"batch_size", "learning_rate", "eval_interval"})
    assert {name: THEIRS[name] for name in nanogpt.DEFAULTS} == nanogpt.DEFAULTS


def test_every_key_that_is_named_exists_and_takes_the_value():
    found = {
        key: value for name in nanogpt.KEYS for key, value in keys_of(name, decay_lr=False, wandb_log=True).items()
    }
    assert found.pop("track") == "wandb"
    assert found.keys() <= DEFAULTS.keys()
    Config(**found)


@pytest.mark.parametrize(
    "words, keys",
    [
        ("--gradient_accumulation_steps=40 --batch_size=12", "write --micro_batch_size=12 --batch_size=480;"),
        ("--batch_size 8 --gradient_accumulation_steps 5", "write --micro_batch_size=8 --batch_size=40;"),
        ("--gradient_accumulation_steps=5", "write --micro_batch_size=12 --batch_size=60;"),
        ("--eval_iters=200 --batch_size=64", "write --eval_windows=12800;"),
        ("--max_iters=5000 --n_layer=2 --block_size=256", "write --max_steps=5000 --context_length=256;"),
        ("--warmup_iters=10 --lr_decay_iters=100", "write --warmup_steps=10 --lr_decay_steps=100;"),
        ("--decay_lr=False --learning_rate=3e-5", "write --warmup_steps=0 --min_lr=3e-05;"),
        ("--decay_lr=False --learning_rate=1", "write --warmup_steps=0 --min_lr=1;"),
        ("--decay_lr=True", "here, leave out decay_lr=True (the default here);"),
        ("--always_save_checkpoint=True --eval_interval=50", "write --save_interval=50;"),
        ("--always_save_checkpoint=False", "leave out always_save_checkpoint=False"),
        ("--wandb_log=True", "write --track=wandb;"),
        ("--wandb_run_name=mine", "leave out wandb_run_name (the run is named after out_dir)"),
        ("--eval_only=True", "leave out eval_only (`python evaluate.py` evaluates)"),
        ("--backend=gloo --max_iters=9", "write --max_steps=9; leave out backend (nccl is chosen on GPUs"),
        ("--block_size", "no value: expected one such as block_size=1024"),
        ("--block_size=many", "block_size=many: expected one such as block_size=1024"),
        ("--max_iters=1e3", "max_iters=1000.0: expected one such as"),
        ("--max_iters=100 --gradient_accumulation_steps=4 --batch_size=x", "batch_size=x: expected one such as"),
        ("--init_from=gpt2", "expected, for OpenAI's model of that name, hf:gpt2"),
        ("--init_from=gpt2-xl", "expected, for OpenAI's model of that name, hf:gpt2-xl"),
    ],
)
def test_a_command_line_of_nanogpts(words, keys, refused):
    line = refused(load_config, *words.split())
    assert keys in line
    assert "docs/from-nanogpt.md" in line or "expected" in line


def test_what_is_written_instead_is_accepted():
    line = (
        "--max_iters=7 --gradient_accumulation_steps=4 --batch_size=3 --eval_iters=2 --decay_lr=False --warmup_iters=0"
    )
    with pytest.raises(Exception, match="nanoGPT") as error:
        load_config(line.split())
    words = re.search(r"write (.*?);", str(error.value))[1].split()
    config = load_config(words)
    assert (config.max_steps, config.micro_batch_size, config.batch_size, config.eval_windows) == (7, 3, 12, 6)
    assert config.min_lr == config.learning_rate


def test_a_config_file_of_nanogpts(tmp_path, refused):
    path = tmp_path / "train.py"
    text = "# a comment\nn_layer = 2\nblock_size = 4 * 64\nbatch_size = 8\ngradient_accumulation_steps = 5 * 8\n"
    path.write_text(text + "wandb_run_name = 'run' + str(3)\nwandb_log = True\n")
    line = refused(load_config, str(path))
    keys = "context_length = 256, micro_batch_size = 8, batch_size = 320, track = 'wandb'"
    assert f"{path} line 3: block_size, gradient_accumulation_steps" in line and f"write {keys}" in line


def test_the_page_has_every_name_and_its_keys():
    page = (ROOT / "docs" / "from-nanogpt.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    for name in THEIRS:
        row = next((row for row in rows if re.search(rf"`{name}\b", row[0])), None)
        assert row, f"{name} is not in the table"
        if name in nanogpt.KEYS:
            keys = keys_of(name, decay_lr=False, wandb_log=True)
            assert all(re.search(rf"\b{key}\b", row[1]) for key in keys), (name, row)
        elif name in nanogpt.INSTEAD:
            assert row[2].strip(), name
        else:
            assert "the same" in row[1] or name in row[1] or name == "batch_size", (name, row)
