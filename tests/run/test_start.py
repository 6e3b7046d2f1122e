"""Start of a run: what it takes from the run that it resumes or the model that it starts from, and what it refuses."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import (
    LINE,
    assert_same_state,
    contents,
    flags,
    replace,
    rows,
    saved,
    spy,
    tiny,
    write_folder,
    write_state,
)

import sample
import train
from lab import replay
from nanoladder import checkpoint, machine
from nanoladder.config.keys import REMOVED
from nanoladder.machine import device
from nanoladder.run import Run, load_config, start
from nanoladder.tokenizer.encoding import build_tokenizer, encode, load_tokenizer

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 17, "bias": False, "context_length": 16}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dense):
    """An uninterrupted run of 6 steps. Read-only."""
    out_dir = tmp_path_factory.mktemp("whole") / "run"
    config = tiny(dataset=str(dense), out_dir=str(out_dir), dropout=0.2, eval_interval=3)
    train.train(config)
    return config


@pytest.fixture(scope="module")
def three_steps(whole, tmp_path_factory):
    """The same run, ended after 3 steps. Read-only."""
    config = replace(whole, out_dir=str(tmp_path_factory.mktemp("half") / "run"), max_steps=3, lr_decay_steps=6)
    train.train(config)
    return config


@pytest.fixture
def half(three_steps, tmp_path):
    """A writable copy of the run that ended after 3 steps."""
    shutil.copytree(three_steps.out_dir, tmp_path / "half")
    return replace(three_steps, out_dir=str(tmp_path / "half"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Two datasets with other vocabularies: one of the same size, one smaller."""
    lines = {"as_many": LINE.replace("t", "z"), "fewer": LINE.replace("t", "s")}
    found = {}
    for name, line in lines.items():
        tokenizer = build_tokenizer("char", [line])
        ids = encode(tokenizer, line * 8)
        folder = tmp_path_factory.mktemp("data") / name
        found[name] = write_folder(folder, ids, ids, tokenizer.n_vocab, encoding=tokenizer, tokenizer="char")
    return found


@pytest.fixture
def bare(dense, tmp_path):
    """The dataset as nanoGPT would have written it: only tokens."""
    (tmp_path / "bare").mkdir()
    for name in ("train.bin", "val.bin"):
        shutil.copyfile(dense / name, tmp_path / "bare" / name)
    return tmp_path / "bare"


@pytest.fixture
def converted(whole, tmp_path):
    """converted(encoding) -> init_from of the run's model in Hugging Face's format, with that tokenizer."""

    def convert(encoding):
        checkpoint.interop.write_huggingface(tmp_path / "hf", saved(whole), encoding)
        return f"hf:{tmp_path}/hf"

    return convert


# -- the tokenizer


@pytest.mark.parametrize("name", ["as_many", "fewer"])
@pytest.mark.parametrize("start", ["resume", "auto", "checkpoint", "hf"])
def test_another_tokenizer_is_refused_and_nothing_is_replaced(name, start, half, others, converted, dense, refused):
    before = contents(half.out_dir)
    given = {"dataset": others[name], "out_dir": half.out_dir, "init_from": start, "vocab_size": 17}
    if start in ("checkpoint", "hf"):
        source = f"{half.out_dir}/last.safetensors" if start == "checkpoint" else converted(load_tokenizer(dense))
        given |= {"out_dir": f"{half.out_dir} new", "init_from": source}
    line = refused(train.main, *flags(**given))
    assert f"dataset={others[name]} has another tokenizer (char" in line
    assert (f"expected --dataset={dense}, or data prepared with that" in line) == (start != "hf")
    place = given["init_from"] if start == "hf" else half.out_dir
    assert f"`python data/text/prepare.py --input FILES --tokenizer={place} --out_dir=FOLDER`" in line
    assert contents(half.out_dir) == before and not Path(f"{half.out_dir} new").exists()


def test_the_same_tokenizer_in_another_folder_continues(half, dense, tmp_path, run_main):
    shutil.copytree(dense, tmp_path / "again")
    result = run_main(train.main, f"--out_dir={half.out_dir}", "--init_from=resume", f"--dataset={tmp_path}/again")
    assert result.code == 0 and f"but dataset={tmp_path}/again (was {dense})" in result.out


def test_a_run_continues_on_data_without_a_tokenizer_and_keeps_its_own(half, bare, others, run_main, refused):
    words = f"--out_dir={half.out_dir}", "--init_from=resume"
    assert run_main(train.main, *words, f"--dataset={bare}", "--max_steps=4").code == 0
    assert saved(half)["progress"]["step"] == 4
    assert "another tokenizer" in refused(train.main, *words, f"--dataset={others['as_many']}", "--max_steps=5")


# -- the data


@pytest.fixture
def changed(dense, tmp_path):
    """changed(folder, times) writes a dataset with the tokenizer of `dense` and other tokens into a folder."""
    tokenizer = load_tokenizer(dense)

    def write(folder, times):
        ids = encode(tokenizer, LINE[::-1] * times)
        return write_folder(folder, ids * 4, ids, tokenizer.n_vocab, encoding=tokenizer, tokenizer="char")

    return write


@pytest.mark.parametrize("given", ["alone", "named"])
def test_data_that_changed_under_their_name_are_refused_unless_new_data(
    given, half, changed, tmp_path, run_main, refused
):
    data = changed(tmp_path / "data", 8)
    words = [f"--out_dir={tmp_path}/run", "--init_from=auto"]
    words += [f"--dataset={data}"] * (given == "named")
    first = flags(dataset=data, out_dir=tmp_path / "run", save_interval=1)
    assert run_main(train.main, *first, "--max_steps=2", "--lr_decay_steps=6").code == 0
    for times, step in ((9, 3), (10, 4)):  # what was allowed once is not allowed for good
        changed(data, times)
        before = contents(tmp_path / "run")
        line = refused(train.main, *words, f"--max_steps={step}")
        has = f"dataset={data} has other data than those of {tmp_path}/run/last.safetensors: train.bin has "
        assert has in line and "expected the same data, or --new_data=True" in line
        assert has in refused(replay.main, *words, f"--max_steps={step}", f"--step={step}")
        assert contents(tmp_path / "run") == before
        result = run_main(train.main, *words, f"--max_steps={step}", "--new_data=True")
        assert result.code == 0 and has in result.out
    result = run_main(train.main, *words, "--max_steps=5")
    assert result.code == 0 and "has other data" not in result.out


def test_another_dataset_by_name_continues_and_the_data_are_said_to_differ(half, changed, tmp_path, run_main):
    other = changed(tmp_path / "other", 9)
    result = run_main(
        train.main, f"--out_dir={half.out_dir}", "--init_from=resume", f"--dataset={other}", "--max_steps=4"
    )
    assert result.code == 0 and f"but dataset={other} (was {half.dataset}), max_steps=4" in result.out
    assert f"dataset={other} has other data than those of {half.out_dir}/last.safetensors: train.bin has" in result.out


# -- the best checkpoint


@pytest.mark.parametrize("what", ["windows", "data"])
def test_losses_of_another_validation_are_not_compared(what, half, changed, tmp_path, run_main, monkeypatch):
    """The best checkpoint keeps its contents under another name; until the next evaluation there is none."""
    log = Run.log_evaluation
    monkeypatch.setattr(Run, "log_evaluation", lambda run, _: log(run, 90.0 - run.progress["step"]))
    key = "--eval_windows=1" if what == "windows" else f"--dataset={changed(tmp_path / 'other', 9)}"
    said, folder = "best.safetensors, of step 3, becomes best_00000003.safetensors", Path(half.out_dir)
    best, words = (folder / "best.safetensors").read_bytes(), [f"--out_dir={folder}", "--init_from=resume", key]
    assert said not in run_main(train.main, *words).out  # nothing is left to train
    assert (folder / "best.safetensors").read_bytes() == best
    result = run_main(train.main, *words, "--max_steps=4", "--eval_interval=0")
    assert result.code == 0 and said in result.out
    assert checkpoint.best_or_last(folder, "best").name == "last.safetensors"
    result = run_main(train.main, *words, "--max_steps=6", "--eval_interval=1")
    assert said not in result.out and saved(half, "best")["progress"]["step"] == 6
    assert saved(half)["progress"].items() >= {"best_val_loss": 84.0, "best_step": 6}.items()
    assert (folder / "best_00000003.safetensors").read_bytes() == best


@pytest.mark.parametrize("step", [3, 4])
def test_a_best_checkpoint_that_is_missing_is_replaced(step, half, run_main, monkeypatch):
    """By the checkpoint to resume, if that is the best; else by the next evaluation's."""
    words, best = [f"--out_dir={half.out_dir}", "--init_from=resume"], Path(half.out_dir, "best.safetensors")
    assert run_main(train.main, *words, f"--max_steps={step}", "--eval_interval=0").code == 0
    best.unlink()
    log = Run.log_evaluation
    monkeypatch.setattr(Run, "log_evaluation", lambda run, _: log(run, 90.0))
    result = run_main(train.main, *words, "--max_steps=5", "--eval_interval=5")
    assert f"{best} is missing; the next evaluation is the best so far" in result.out or step == 3
    assert saved(half, "best")["progress"]["step"] == (3 if step == 3 else 5)


# -- the config of a run that continues


@pytest.mark.parametrize("init_from", ["resume", "auto"])
def test_a_run_continues_with_its_own_config(init_from, whole, half, run_main):
    given = f"--out_dir={half.out_dir}", f"--init_from={init_from}", "--max_steps=6"
    result = run_main(train.main, *given)
    assert result.code == 0
    path = f"{half.out_dir}/last.safetensors"
    assert f"continues {path}, step 3, as it was configured, but max_steps=6 (was 3)\n" in result.out
    assert_same_state(half, whole)
    assert rows(half, "step", "train_loss", "lr") == rows(whole, "step", "train_loss", "lr")
    out = run_main(train.main, *given).out
    assert f"{path}, step 6, as it was configured\n" in out
    assert out.splitlines()[-1] == "nothing is left to train: step 6 is done; --max_steps=N trains up to step N"


def test_a_changed_schedule_says_the_rate_before_and_after_and_how_to_keep_it(half, run_main):
    def said(*keys):
        out = run_main(train.main, f"--out_dir={half.out_dir}", "--init_from=resume", *keys).out
        return [line for line in out.splitlines() if line.startswith("learning rate of step ")]

    line = "learning rate of step {}, which would have been {}; --lr_decay_steps={} keeps the decay as it was"
    assert said("--lr_decay_steps=0", "--max_steps=4") == [line.format("4: 0.001", "0.0055", 6)]
    assert said("--max_steps=8") == [line.format("5: 0.0055", "0.001", 4)]
    assert said("--max_steps=9", "--lr_decay_steps=8") == []


def test_a_run_checks_its_config_and_attention_and_chooses_its_device_once(half, run_main, monkeypatch):
    calls, once = Counter(), {"check": start, "attention_kernel": device, "choose_device": machine}
    for name, module in (once | {"check_config": device}).items():
        spy(monkeypatch, module, name, lambda *_, name=name: calls.update([name]))
    words = [f"--out_dir={half.out_dir}", "--init_from=resume", "--max_steps=4", "--dtype=auto"]
    assert run_main(train.main, *words).code == 0
    assert calls == dict.fromkeys(once, 1)


def test_a_stage_changes_the_run_that_continues_and_is_not_kept(half, run_main):
    words = f"--out_dir={half.out_dir}", "--init_from=resume"
    result = run_main(train.main, *words, "--stage=flash", "--adamw_impl=fused", "--max_steps=4")
    assert result.code == 0 and "but max_steps=4 (was 3), " in result.out
    assert "attention=sdpa (was matmul)" in result.out and "adamw_impl=fused (was forloop)" in result.out
    config = load_config([*words])
    assert (config.attention, config.adamw_impl, config.dropout) == ("sdpa", "fused", half.dropout)
    assert not {"stage", "recipe"} & set(json.loads(Path(half.out_dir, "config.json").read_text()))


def test_config_files_replace_the_run_s_own_config_except_for_its_shape(half, tmp_path):
    (tmp_path / "other.py").write_text("batch_size = 8\nn_embd = 64\n")
    config = load_config([f"{tmp_path}/other.py", f"--out_dir={half.out_dir}", "--init_from=resume"])
    assert (config.batch_size, config.n_embd, config.n_layer, config.vocab_size) == (8, 64, 2, 17)
    assert config.dropout == 0.0 and config.learning_rate == 6e-4  # the defaults


INVALID = {
    b'{"n_layer": "two"}': ": n_layer='two': expected a whole number",
    b'{"n_layer": [2]}': ": n_layer=[2]: expected a whole number",
    b'{"n_layers": 2}': ": unknown key 'n_layers', did you mean 'n_layer'?",
    b'{"n_layer": 2': " is not the config of a run (JSONDecodeError: Expecting ',' delimiter",
    b"": " is not the config of a run (JSONDecodeError: Expecting value",
    b"\xff": " is not the config of a run (UnicodeDecodeError: 'utf-8' codec",
    b"[]": " is not the config of a run (TypeError: 'list' object is not a mapping); expected a JSON object of keys",
    b'"text"': " is not the config of a run (TypeError: 'str' object",
    b"[" * 100_000: " is not the config of a run (RecursionError: maximum recursion",
    b'{"dropout": 1%s}' % (b"0" * 400): " is not the config of a run (OverflowError: int too large",
}


@pytest.mark.parametrize("init_from", ["resume", "auto"])
def test_a_config_of_a_run_that_is_not_valid_is_refused(init_from, half, refused):
    path = Path(half.out_dir, "config.json")
    words = f"--out_dir={half.out_dir}", f"--init_from={init_from}"
    for text, fragment in INVALID.items():
        path.write_bytes(text)
        assert f"{path}{fragment}" in refused(train.main, *words)


def test_a_run_with_an_unknown_key_is_refused_in_one_line(half, tmp_path, refused):
    """In its config.json, and in a checkpoint to resume or to start from."""
    key, said = "learning_rte", "unknown key 'learning_rte', did you mean 'learning_rate'?; --help lists every key\n"
    file, path = Path(half.out_dir, "config.json"), Path(half.out_dir, "last.safetensors")
    words, text = (f"--out_dir={half.out_dir}", "--init_from=resume"), file.read_text()
    file.write_text(json.dumps({**json.loads(text), key: "none"}))
    assert refused(train.main, *words) == f"error: {file}: {said}"

    file.write_text(text)
    state = checkpoint.load(path)
    write_state(tmp_path / "old.safetensors", {**state, "config": {**state["config"], key: "none"}})
    shutil.copy(tmp_path / "old.safetensors", path)
    assert refused(train.main, *words) == f"error: {path}: {said}"
    begins = f"--out_dir={tmp_path}/new", f"--init_from={path}", f"--dataset={half.dataset}"
    assert refused(train.main, *begins) == f"error: {path}: {said}"
    assert f"{path}: {said}" in refused(sample.main, f"--out_dir={half.out_dir}", "--checkpoint=last")


def test_a_run_of_an_earlier_version_is_resumed_sampled_and_evaluated(half, run_main):
    """Its config.json and its checkpoints have keys of rungs that are gone, all off."""
    file, words = Path(half.out_dir, "config.json"), (f"--out_dir={half.out_dir}", "--device=cpu")
    file.write_text(json.dumps(json.loads(file.read_text()) | REMOVED))
    for path in Path(half.out_dir).glob("*.safetensors"):
        state = saved(half, path.stem)
        write_state(path, {**state, "config": state["config"] | REMOVED})
    assert run_main(sample.main, *words, "--checkpoint=last", "--max_new_tokens=1").code == 0
    assert run_main(train.main, *words, "--init_from=resume").code == 0
    assert not REMOVED.keys() & json.loads(file.read_text()).keys()


def test_without_its_config_a_run_continues_by_config_files(half, tmp_path, run_main):
    Path(half.out_dir, "config.json").unlink()
    keys = {key: value for key, value in vars(half).items() if key not in ("out_dir", "init_from", "max_steps")}
    (tmp_path / "x.py").write_text("".join(f"{key} = {value!r}\n" for key, value in keys.items()))
    words = f"{tmp_path}/x.py", f"--out_dir={half.out_dir}", "--init_from=resume", "--max_steps=4"
    assert run_main(train.main, *words).code == 0 and saved(half)["progress"]["step"] == 4


# -- the shape of the model that a run begins from


def test_a_model_gives_its_shape_unless_a_key_says_otherwise(whole, converted, dense, tmp_path):
    (tmp_path / "x.py").write_text("n_head = 4\nlearning_rate = n_embd / 1000\n")
    for source in (f"{whole.out_dir}/last.safetensors", converted(load_tokenizer(dense))):
        config = load_config([f"--init_from={source}"])
        assert {key: getattr(config, key) for key in SHAPE} == SHAPE and config.max_steps == 10_000
        config = load_config([f"{tmp_path}/x.py", f"--init_from={source}", "--context_length=8"])
        given = config.n_head, config.learning_rate, config.context_length, config.n_layer
        assert given == (4, 0.032, 8, 2)
