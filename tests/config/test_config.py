import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

import train
from lab.predict import predict
from model import GPT
from nanoladder import checkpoint, config
from nanoladder.config import DEFAULTS, Config, stages
from nanoladder.config.keys import INSTEAD, OPTIONS
from nanoladder.errors import BadInput
from nanoladder.run import load_config
from nanoladder.run.start import read_config

PRESETS = sorted(config.STAGES_DIR.parent.glob("*.py"))


@pytest.fixture
def file(tmp_path):
    """file(text) writes a config file and returns its path."""

    def write(text, name="x.py"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def test_no_arguments_give_the_defaults():
    assert load_config([]) == Config() and config.differences(Config()) == {}


def test_without_a_word_the_usage_is_printed_and_nothing_trains(run_main):
    result = run_main(train.main)
    assert result.code == 2 and result.err.startswith("usage: python train.py [config/x.py ...]")
    assert result.out == "" and result.err.count("\n  python train.py ") == 3


def test_files_apply_from_left_to_right(file):
    a, b = file("n_layer = 3\nseed = 1", "a.py"), file("n_layer = 5", "b.py")
    assert config.differences(load_config([a, b])) == {"n_layer": 5, "seed": 1}
    assert config.differences(load_config([b, a])) == {"n_layer": 3, "seed": 1}


@pytest.mark.parametrize("words", [["--n_layer=7"], ["--n_layer", "7"], ["-n_layer", "7"]])
@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins_wherever_it_stands(file, words, first):
    path = file("n_layer = 3")
    assert load_config([*words, path] if first else [path, *words]).n_layer == 7


TYPED = {"--dropout=1e-1": 0.1, "--learning_rate=1": 1.0, "--bias=1": True, "--compile=false": False}
TYPED |= {"--out_dir=a=b c": "a=b c", "--max_steps=1_000": 1000}


@pytest.mark.parametrize("key", ["out_dir", "dataset", "init_from"])
def test_a_path_begins_at_home_wherever_it_is_set(key, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(checkpoint, "shape_of", lambda source: {})
    (tmp_path / "config.json").write_text(json.dumps({key: "~/x y"}))
    for word in (f"--{key}=~/x y", file(f"{key} = '~/x y'")):
        assert getattr(load_config([word]), key) == f"{tmp_path}/x y"
    assert read_config(tmp_path / "config.json") == {key: f"{tmp_path}/x y"}
    assert getattr(load_config([f"--{key}=hf:~/x"]), key) == f"hf:{tmp_path}/x"
    assert getattr(load_config([f"--{key}=a~/x"]), key) == "a~/x"


@pytest.mark.parametrize("word, value", TYPED.items())
def test_a_value_takes_its_keys_type(word, value):
    result = getattr(load_config([word]), word[2:].partition("=")[0])
    assert result == value and type(result) is type(value)


def test_expressions_see_earlier_keys_and_the_command_line(file):
    path = file(
        '"""A docstring."""\nn_embd = 64 * 2\nn_head = n_embd // 32\nlearning_rate = max(1e-4, 1e-3)\nmin_lr = 1\n'
        "min_lr = learning_rate / 10\nbatch_size = n_head * 2 if not bias else 1"
    )
    expected = {"n_embd": 128, "n_head": 4, "learning_rate": 1e-3, "min_lr": 1e-4, "batch_size": 8}
    assert config.differences(load_config([path])) == expected
    assert load_config([path, "--n_embd=256"]).n_head == 8  # wins within expressions too
    assert load_config([path, "--n_head=1"]).batch_size == 2


# (words of a command line, or the text of a file; parts that the error line must contain)
BAD_INPUT = [
    # keys, and names of nanoGPT's
    (["--n_layr=3"], ["n_layr", "command line", "'n_layer'"]),
    (["--lr=1"], ["unknown key 'lr'", "'learning_rate'"]),
    (["--n_layer"], ["--n_layer", "no value", "a whole number"]),
    (["--\x1b[2J=1"], [r"\x1b[2J"]),
    ("n_layer = 2\nlearning_rat = 3", ["x.py line 2", "'learning_rat'", "'learning_rate'"]),
    (["--block_size=256"], ["command line", "block_size", "expected context_length", "docs/from-nanogpt.md"]),
    (
        ["--max_iters", "5", "--n_layr=3", "--n_layer=2"],
        ["keys 'max_iters', expected max_steps", "; 'n_layr', did you mean 'n_layer'?; docs"],
    ),
    (
        "out_dir = 'x'\neval_iters = 200\nblock_size = 64\nn_layer = block_size / 5",
        [
            "x.py: unknown keys 'eval_iters' (line 2), expected eval_windows",
            "; 'block_size' (line 3), expected context_",
        ],
    ),
    (["--max-seq-len=512"], ["key 'max-seq-len', expected context_length; docs/from-nanochat.md compares all; --help"]),
    (["--resume", "--out_dir=x"], ["unknown key 'resume', expected --init_from=resume, which continues the run in"]),
    ("betas = (0.9, 0.95)", ["x.py line 1", "betas", "beta2"]),
    ("batch_size = 8\ngradient_accumulation_steps = 5 * 8", ["x.py line 2", "micro_batch_size, of one forward"]),
    (["--init_from=gpt2-xl"], ["no checkpoint at gpt2-xl", "or hf:gpt2"]),
    # types
    (["--n_layer=1.5"], ["n_layer='1.5'", "command line", "a whole number"]),
    (["--bias=maybe"], ["bias='maybe'", "True or False"]),
    ("n_layer = True", ["x.py line 1", "n_layer=True", "a whole number"]),
    (["--dtype=bfloat"], ["dtype='bfloat'", "auto, float32, bfloat16, float16"]),
    (["--micro_batch_size=atuo"], ["micro_batch_size='atuo'", "a whole number or auto"]),
    # ranges
    (["--n_layer=0"], ["n_layer=0", "at least 1"]),
    (["--dropout=1"], ["dropout=1", "below 1"]),
    (["--beta1=1"], ["beta1=1", "below 1"]),
    (["--dropout=-0.1"], ["dropout=-0.1", "at least 0"]),
    (["--seed=" + "9" * 30], ["seed=999", f"below {2**63}"]),
    (["--stage=nowhere"], ["stage=nowhere", "ladder.py"]),
    (["--stage"], ["--stage: no value given", "a stage"]),
    (["--stages=amp"], ["unknown key 'stages'", "'stage'"]),
    # files
    (["nowhere/x.py"], ["nowhere/x.py cannot be read in", str(Path.cwd()), "config/gpt2.py"]),
    ([f"{ROOT}/config/refrence.py"], ["refrence.py cannot be read", "did you mean", "config/reference.py'?"]),
    (["quikstart"], ["config file quikstart cannot be read", "did you mean", "config/quickstart.py'?"]),
    (b"n_layer = '\xff'", ["x.py"]),
    (["--out_dir=x\udcff"], [r"command line: out_dir='x\udcff': it is not UTF-8"]),
    (b"seed = 1\nn_layer = 2\0", ["x.py line 2: it has a NUL byte"]),
    (r"out_dir = 'x\0y'", ["x.py line 1: out_dir='x\\x00y': it has a NUL byte"]),
    ("seed = 1\nn_layer = 1 // 0", ["x.py line 2", "ZeroDivisionError", "zero"]),
]


@pytest.mark.parametrize("given, named", BAD_INPUT, ids=lambda value: repr(value)[:40])
def test_bad_input_ends_in_one_line_that_names_key_and_place(given, named, file, refused):
    words = given if isinstance(given, list) else [file(given)]
    line = refused(load_config, *words)
    assert all(word in line for word in named), line


def test_a_config_file_is_python(file):
    text = "import math\n_root = math.sqrt(16)\ndef half(x):\n    return x // 2\nif not bias:\n    n_layer = half(8)\n"
    assert config.differences(load_config([file(text + "n_layer += int(_root)")])) == {"n_layer": 8}


def test_a_page_for_users_of_another_project_has_every_name_that_is_refused_for_another():
    for page, names in INSTEAD.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not [name for name in names if f"`{name}" not in text]


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_of_elsewhere_is_refused_in_one_line_that_says_what_to_write(key, file, refused):
    line = refused(load_config, file(f"seed = 1\n{key} = 'none'"))
    assert f"x.py line 2: unknown key {key!r}, expected {OPTIONS[key]};" in line
    if key not in stages.LADDERS:
        line = refused(load_config, f"--{key}=none")
        assert f"command line: unknown key {key!r}, expected {OPTIONS[key]};" in line


SELECTIVE = {"activation_checkpointing": "selective"}
IN_BACKWARD = {"optimizer_in_backward": True, "grad_clip": 0.0}

# (incompatible values; parts of the error line: keys, values and a way out)
IMPOSSIBLE = [
    ({"attention": "blocks", "dropout": 0.1}, ["attention=blocks", "dropout=0.1", "--attention=auto"]),
    ({"n_embd": 100, "n_head": 3}, ["n_embd=100", "n_head=3", "multiple of n_head"]),
    ({"batch_size": 12, "micro_batch_size": 5}, ["batch_size=12", "micro_batch_size=5", "a divisor of batch_size"]),
    ({"head_lr": 2.0}, ["head_lr=2.0", "--embedding_lr"]),
    ({"position": "rotary", "n_embd": 36, "n_head": 4}, ["position=rotary", "n_embd=36", "to be even"]),
    ({"min_lr": 1.0, "learning_rate": 0.1}, ["min_lr=1.0", "learning_rate=0.1", "a tenth"]),
    ({"activation_checkpointing": "every:0"}, ["activation_checkpointing=every:0", "every:1"]),
    (SELECTIVE | IN_BACKWARD, ["selective", "optimizer_in_backward=True", "every:1"]),
    (SELECTIVE | {"shard": "full"}, ["selective", "shard=full", "--compile=False"]),
    (SELECTIVE | {"pipeline_parallel": 2}, ["selective", "pipeline_parallel=2", "every:1"]),
    ({"tensor_parallel": 5}, ["n_head=12", "tensor_parallel=5", "divisor"]),
    ({"tensor_parallel": 2, "context_length": 15}, ["context_length=15", "tensor_parallel=2", "multiple"]),
    ({"context_parallel": 5}, ["n_head=12", "10 pieces", "context_parallel=5", "multiple of 10"]),
    (
        {"context_parallel": 5, "context_length": 1000, "attention": "matmul"},
        ["attention=matmul", "context_parallel=5", "n_head=12", "--attention=sdpa"],
    ),
    ({"optimizer_in_backward": True}, ["optimizer_in_backward=True", "grad_clip=1.0", "--grad_clip=0"]),
    (IN_BACKWARD | {"micro_batch_size": 8}, ["micro_batch_size=8", "--micro_batch_size=0"]),
    ({"float8": True, "tensor_parallel": 2}, ["float8=True", "tensor_parallel=2", "--float8=False"]),
    ({"float8": True, "n_embd": 24, "n_head": 3}, ["float8=True", "n_embd=24", "multiples of 16"]),
    ({"float8": True, "context_length": 32, "context_parallel": 4}, ["context_parallel=4", "multiples of 16"]),
    ({"optimizer": "galore", "shard": "full"}, ["optimizer=galore", "shard=full", "--optimizer=adamw8bit"]),
]


@pytest.mark.parametrize("values, named", IMPOSSIBLE, ids=lambda value: repr(value)[:60])
def test_incompatible_values_are_refused(values, named, refused):
    line = refused(load_config, *(f"--{key}={value}" for key, value in values.items()))
    assert all(word in line for word in [*named, "expected"]), line


def test_a_micro_batch_of_the_whole_batch_is_none():
    whole = {"batch_size": 8, "micro_batch_size": 8}
    load_config([f"--{key}={value}" for key, value in (whole | IN_BACKWARD).items()])


def test_help_lists_every_key_with_its_default_under_headings(run_main):
    result = run_main(load_config, "--help")
    assert result.code == 0 and result.err == "" and max(map(len, result.out.splitlines())) <= 80
    for key, default in DEFAULTS.items():
        assert re.search(rf"^  {key}={re.escape(str(default))} +\S", result.out, re.MULTILINE), key
    blocks = [block.splitlines() for block in result.out.split("\n\n")[2:]]
    assert [lines[0] for lines in blocks] == list(config.HEADINGS.values())
    assert [lines[1].strip().partition("=")[0] for lines in blocks] == list(config.HEADINGS)


def test_stage_applies_the_ladder_up_to_it(tmp_path, monkeypatch, file):
    file("seed = 0\ngrad_clip = 0", "00_naive.py")
    file("seed = batch_size + 1", "01_first.py")
    file("seed = 2", "02_second.py")
    monkeypatch.setattr("nanoladder.config.stages.STAGES_DIR", tmp_path)
    monkeypatch.setitem(stages.LADDERS, "stage", tmp_path)
    assert config.stage_names() == ["naive", "first", "second"]
    preset = file("seed = 9\nbatch_size = 3", "preset.py")
    assert load_config([preset, "--stage=naive"]).seed == 0
    assert load_config([preset, "--stage=first"]).seed == 4
    assert load_config([preset, "--stage", "second"]).seed == 2
    assert load_config([preset, "--stage=second"]).grad_clip == 0
    assert load_config([preset, "--stage=second", "--seed=7"]).seed == 7
    assert load_config([preset, str(tmp_path / "00_naive.py"), str(tmp_path / "02_second.py")]).seed == 2
    with pytest.raises(BadInput, match=r"stage=secnd.*'second'"):
        load_config(["--stage=secnd"])


def test_a_new_file_stands_on_the_trunk_unless_it_names_another(tmp_path, monkeypatch, file):
    lines = {
        "naive": "",
        "first": "",
        "aside": "Stands on: naive",
        "further": "Stands on: aside",
        "new": "",
        "newer": "",
    }
    for number, (name, line) in enumerate(lines.items()):
        file(f'"""It is {name}.\n\n{line}\n"""\nseed = {number}', f"{number:02}_{name}.py")
    monkeypatch.setattr("nanoladder.config.stages.STAGES_DIR", tmp_path)
    assert {name: stages.stage_below(name) for name in lines} == {
        "naive": None,
        "first": "naive",
        "aside": "naive",
        "further": "aside",
        "new": "first",
        "newer": "new",
    }
    assert [branch + name for branch, name in stages.tree()] == [
        "naive",
        "└ aside",
        "  further",
        "first",
        "new",
        "newer",
    ]
    assert load_config(["--recipe=rotary"]).optimizer == "muon"
    with pytest.raises(BadInput, match=r"recipe=second: no such rung"):
        load_config(["--recipe=second"])


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_builds_with_the_parameters_its_docstring_states(path, monkeypatch):
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "bias": True, "context_length": 1024}
    monkeypatch.setattr(checkpoint, "shape_of", {"hf:gpt2": gpt2}.get)
    preset = load_config([str(path)])
    vocab_sizes = {"text_gpt2": 50257, "python_stdlib_byte": 256, "shakespeare_char": 65}
    with torch.device("meta"):
        model = GPT(dataclasses.replace(preset, vocab_size=preset.vocab_size or vocab_sizes.get(preset.dataset, 4096)))
    stated = re.search(r"([\d.]+) ?M\b", path.read_text(encoding="utf-8"))
    if stated:
        assert model.n_params / 1e6 == pytest.approx(float(stated[1]), rel=0.02)
    else:
        assert path.stem in ("quickstart", "dial")


DIAL = "config/dial.py"


@pytest.mark.parametrize("depth", range(2, 25))
def test_the_dial_s_width_tokens_and_steps_follow_its_depth(depth):
    shallower, chosen = (load_config([DIAL, f"--n_layer={n}", "--vocab_size=4096"]) for n in (depth - 1, depth))
    tokens = chosen.max_steps * chosen.batch_size * chosen.context_length
    assert tokens == pytest.approx(10 * 12 * depth * chosen.n_embd**2, rel=0.05)
    assert chosen.n_embd == 64 * chosen.n_head == 64 * depth and chosen.out_dir.endswith(f"_{depth}")
    for key in ("n_embd", "max_steps"):
        assert getattr(shallower, key) < getattr(chosen, key)
    assert shallower.learning_rate > chosen.learning_rate > chosen.min_lr > 0
    with torch.device("meta"):
        model = GPT(chosen)
    assert sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) == 12 * depth * chosen.n_embd**2


def test_the_dial_s_page_has_its_numbers():
    page = (ROOT / "docs" / "dial.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3].strip("| ")]
    shown = [cells for cells in rows if cells[0].isdecimal()]
    assert len(shown) > 5
    for depth, *cells in shown:
        chosen = load_config([DIAL, f"--n_layer={depth}", "--vocab_size=4096"])
        tokens = chosen.max_steps * chosen.batch_size * chosen.context_length
        with torch.device("meta"):
            n_params = GPT(chosen).n_params
        assert cells == [
            *map(str, (chosen.n_embd, chosen.context_length, chosen.batch_size)),
            *(f"{chosen.max_steps:,}", f"{tokens / 1e6:,.1f}", f"{n_params / 1e6:,.1f}"),
            f"{chosen.learning_rate:.4f}",
        ]


def test_the_rest_of_the_dial_follows_a_key_on_the_command_line():
    usual, halved = load_config([DIAL]), load_config([DIAL, "--batch_size=8", "--n_embd=64"])
    assert (halved.batch_size, halved.n_embd, halved.n_head) == (8, 64, usual.n_head)
    assert halved.max_steps * 8 * halved.context_length == pytest.approx(10 * 12 * 2 * 64**2, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3, 5, 8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (12, 16, 24))])
def test_the_dial_trains_at_every_depth(depth, dense, tmp_path, run_main):
    keys = ["--context_length=16", "--batch_size=2", "--max_steps=2", "--eval_windows=2", "--compile=False"]
    words = [f"--n_layer={depth}", f"--dataset={dense}", f"--out_dir={tmp_path}", "--sample_interval=0", *keys]
    result = run_main(train.main, DIAL, *words)
    assert result.code == 0 and f"{depth} blocks" in result.out, result.err


SHARDED = ("gpt2_xl", "gpt_1_5b")  # written for eight GPUs
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt2_medium", "gpt2_large", *SHARDED)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", *NIGHTLY])
def test_the_micro_batches_of_the_presets_of_gpt2_fit_40_gb_and_divide_among_8_gpus(name):
    preset = load_config([f"config/{name}.py", "--compile=False"])
    world_size = 8 if name in SHARDED else 1
    shard = "full" if world_size > 1 else "none"
    peak = predict.predict_memory(dataclasses.replace(preset, shard=shard), "cuda", world_size).peak
    assert 20e9 < peak < 40e9
    assert preset.batch_size // 8 % preset.micro_batch_size == 0
    assert load_config([f"config/{name}.py", "--batch_size=4"]).micro_batch_size == 4


def test_the_heads_of_1_5b_divide_among_the_gpus_of_a_node():
    preset = load_config(["config/gpt_1_5b.py"])
    assert all(preset.n_head % n == preset.n_layer % 4 == preset.batch_size % (8 * n) == 0 for n in (2, 4, 8))


def words_of(values):
    return [f"--{key}={value}" for key, value in values.items()]


@given(st.dictionaries(st.sampled_from(sorted(DEFAULTS)), st.one_of(st.none(), st.integers(), st.floats(), st.text())))
def test_any_values_are_a_config_or_bad_input(odd):
    """odd: {key: value}; None for a good value."""
    values = {key: DEFAULTS[key] if value is None else value for key, value in odd.items()}
    try:
        made = load_config(words_of(values | {"init_from": "scratch"}))
    except BadInput as error:
        assert str(error)
    else:
        assert load_config(words_of(dataclasses.asdict(made))) == made
