"""Checkpoints that are damaged, swapped or made by someone else: refused in one line, fallen back from, or harmless."""

import collections
import io
import os
import pickle
import resource
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import flags, replace, rows, same, saved, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sample
import train
from nanoladder import checkpoint
from nanoladder.run import report

LOGGED = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm"
CASES = 120
FILES = ["last.pt", "step_00000006.pt", "step_00000004.pt", "best.pt"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, dense):
    """A run of 8 steps, whole; the same after 6 of them; and one of another model."""
    folder = tmp_path_factory.mktemp("runs")
    keys = {"dataset": str(dense), "dropout": 0.2, "max_steps": 8, "save_interval": 2, "eval_interval": 2}
    whole = tiny(**keys, n_layer=1, eval_windows=2, out_dir=str(folder / "whole"))
    six = replace(whole, out_dir=str(folder / "six"), max_steps=6, lr_decay_steps=8)
    other = replace(whole, out_dir=str(folder / "other"), n_layer=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plot", lambda *arguments: None)
        for config in (whole, six, other):
            train.train(config)
    return whole, six, other


# -- damage

anywhere = st.one_of(st.integers(0, 10**9), st.integers(0, 400), st.integers(-1500, -1))  # modulo the size


def truncated(content, where):
    return content[: where % len(content)]


def flipped(content, where, bit):
    at = where % len(content)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def overwritten(content, where, patch):
    at = where % len(content)
    return content[:at] + patch + content[at + len(patch) :]


DAMAGES = st.one_of(
    st.tuples(st.just(truncated), anywhere),
    st.tuples(st.just(flipped), anywhere, st.integers(0, 7)),
    st.tuples(st.just(overwritten), anywhere, st.binary(min_size=1, max_size=40)),
    st.tuples(st.sampled_from(["empty", "json", "another model's", "symlink", "folder", *FILES[2:]])),
)


def damage(folder, name, other, how, *arguments):
    """Damages one file of a run."""
    path = folder / name
    content = path.read_bytes() if path.is_file() else b" "
    swapped = folder / str(how)
    if callable(how):
        content = how(content, *arguments)
    elif how in FILES:
        content = swapped.read_bytes() if swapped.is_file() else b""
    elif how != "another model's":
        content = b"" if how == "empty" else b'{"step": 6}'
    else:
        content = Path(other.out_dir, name).read_bytes() if Path(other.out_dir, name).exists() else b""
    path.unlink()
    if how == "symlink":
        path.symlink_to("nowhere")
    elif how == "folder" and name == "last.pt":
        path.mkdir()
    else:
        path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_fallen_back_from_or_harmless(runs, tmp_path, run_main):
    whole, six, other = runs
    outcomes = collections.Counter()
    expected = saved(whole)

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(FILES), DAMAGES, min_size=1), st.sampled_from(["resume", "auto"]))
    def attack(damages, init_from):
        folder = tmp_path / str(outcomes.total())
        shutil.copytree(six.out_dir, folder)
        for name, how in damages.items():
            damage(folder, name, other, *how)
        config = replace(whole, out_dir=str(folder), init_from=init_from)
        result = run_main(train.main, *(f"--{key}={value}" for key, value in vars(config).items()))
        if result.code == 2:
            assert result.out == "" and result.err.startswith("error: ") and result.err.count("\n") == 1
            outcomes["refused"] += 1
        else:
            assert result.code == 0 and "Traceback" not in result.err
            assert rows(config, *LOGGED) == rows(whole, *LOGGED)
            found = saved(config)
            assert all(same(found[part], expected[part]) for part in ("model", "optimizer", "generators", "progress"))
            outcomes["fallen back" if "is damaged" in result.out or "no checkpoint at" in result.out else "loaded"] += 1
        shutil.rmtree(folder)

    attack()
    print(dict(outcomes))
    assert outcomes.total() >= 100 and min(outcomes.values()) >= 5 and len(outcomes) == 3


def test_any_flipped_bit_that_loads_means_nothing(runs, tmp_path):
    _, six, _ = runs
    content, expected = Path(six.out_dir, "last.pt").read_bytes(), saved(six)
    path, found = tmp_path / "x.pt", collections.Counter()

    @settings(max_examples=300)
    @given(anywhere, st.integers(0, 7))
    def attack(where, bit):
        path.write_bytes(flipped(content, where, bit))
        try:
            state = checkpoint.load(path)
        except checkpoint.Damaged as error:
            assert str(path) in str(error) and "\n" not in str(error)
            found["refused"] += 1
        else:
            assert same(state, expected)
            found["harmless"] += 1

    attack()
    print(dict(found))
    assert found["refused"] >= 100 and found["harmless"] >= 1


def test_each_damaged_one_is_named_in_a_line(runs, tmp_path, run_main):
    whole, six, _ = runs
    shutil.copytree(six.out_dir, tmp_path / "run")
    for name in FILES[:2]:
        (tmp_path / "run" / name).write_bytes(b"")
    config = replace(whole, out_dir=str(tmp_path / "run"), init_from="auto")
    result = run_main(train.main, *(f"--{key}={value}" for key, value in vars(config).items()))
    lines = [line for line in result.out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 2 and all(line.endswith("continuing from step_00000004.pt, step 4") for line in lines)
    assert all(name in line for name, line in zip(FILES, lines, strict=False))


def test_where_none_is_whole_all_are_named(runs, tmp_path, refused):
    whole, six, _ = runs
    shutil.copytree(six.out_dir, tmp_path / "run")
    for name in FILES:
        (tmp_path / "run" / name).write_bytes(b"")
    config = replace(whole, out_dir=str(tmp_path / "run"), init_from="auto")
    line = refused(train.main, *(f"--{key}={value}" for key, value in vars(config).items()))
    assert all(name in line for name in FILES)


def test_a_whole_checkpoint_of_another_run_is_what_is_continued(runs, tmp_path):
    whole, six, _ = runs
    other, mixed = (replace(six, seed=2, init_from="auto", out_dir=str(tmp_path / name)) for name in ("other", "mixed"))
    train.train(other)
    shutil.copytree(six.out_dir, mixed.out_dir)
    shutil.copy(Path(other.out_dir, "last.pt"), mixed.out_dir)
    for config in (other, mixed):
        train.train(replace(config, max_steps=8))
    assert same(saved(mixed)["model"], saved(other)["model"])
    assert not same(saved(mixed)["model"], saved(whole)["model"])


def test_a_run_of_which_only_the_history_is_left_is_not_replaced(runs, tmp_path, refused):
    _, six, _ = runs
    (tmp_path / "run").mkdir()
    shutil.copy(Path(six.out_dir, FILES[1]), tmp_path / "run")
    line = refused(train.main, *flags(dataset=six.dataset, out_dir=tmp_path / "run"))
    assert "--overwrite=True" in line and (tmp_path / "run" / FILES[1]).exists()


# -- files that someone made


@pytest.fixture
def refuses(runs, tmp_path, refused):
    """refuses(write): what write(path, state) makes is refused by sample.py and train.py, soon and in little memory."""
    whole, six, _ = runs

    def refuse(write, only_resuming=False):
        path = tmp_path / "run" / "last.pt"
        path.parent.mkdir()
        write(path, saved(six))
        before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = replace(whole, out_dir=str(path.parent), init_from="resume")
        words = {"resume": [f"--{key}={value}" for key, value in vars(config).items()]}
        fresh = replace(config, init_from=str(path), out_dir=str(tmp_path / "new"))
        words["path"] = [f"--{key}={value}" for key, value in vars(fresh).items()]
        lines = [refused(train.main, *words[how]) for how in (["resume"] if only_resuming else words)]
        if not only_resuming:
            lines.append(refused(sample.main, f"--out_dir={path.parent}", "--device=cpu"))
        assert all(str(path) in line and len(line) < 1000 for line in lines)
        assert time.process_time() - before < 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # KiB
        return lines

    return refuse


def changed(part, **changes):
    return lambda path, state: torch.save({**state, part: {**state[part], **changes}}, path)


def without(part, key):
    return lambda path, state: torch.save({**state, part: {k: v for k, v in state[part].items() if k != key}}, path)


def nested(depth, pair=False):
    value = []
    for _ in range(depth):
        value = [value, value] if pair else [value]
    return value


CONFIGS = {
    "many blocks": {"n_layer": 10**9},
    "wide": {"n_embd": 2 * 10**6},
    "wide beyond any integer of C": {"n_embd": 2 * 10**20},
    "many heads": {"n_head": 10**9},
    "long": {"context_length": 10**12},
    "many tokens": {"vocab_size": 10**12},
    "padding": {"pad_vocab_to": 10**15},
    "negative": {"n_layer": -1},
    "none": {"n_embd": 0},
    "text": {"n_layer": "2"},
    "fraction": {"n_head": 2.0},
    "nothing": {"bias": None},
    "huge": {"n_layer": 1 << 2000},
    "long text": {"out_dir": "x" * 10**6},
    "list": {"n_layer": [2]},
    "tensor": {"n_layer": torch.ones(2)},
    "doubling": {"dataset": nested(60, pair=True)},
    "unknown key": {"n_layers": 2},
    "key of another type": {3: 2},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_the_file_does_not_bear_out_is_refused(config, refuses):
    refuses(lambda path, state: torch.save({**state, "config": {**state["config"], **config}}, path))


def expanded(path, state):
    """A model of 48 TB, every weight the same number."""
    wide = 2 * 10**6
    config = {**state["config"], "n_embd": wide}
    weights = {}
    for name, tensor in state["model"].items():
        weights[name] = torch.zeros(()).expand([size // 32 * wide if size % 32 == 0 else size for size in tensor.shape])
    torch.save({**state, "config": config, "model": weights}, path)


def rezipped(path, state, change):
    """A checkpoint's archive written anew; change(archive, record, content) writes a record."""
    torch.save(state, path)
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w") as new:
        for record in old.infolist():
            change(new, record.filename, old.read(record))


def compressed(archive, name, content):
    archive.writestr(name, bytes(10**8) if name.endswith("data/0") else content, zipfile.ZIP_DEFLATED)


def with_pickle(made):
    def change(archive, name, content):
        archive.writestr(name, made if name.endswith("data.pkl") else content)

    return lambda path, state: rezipped(path, state, change)


class Call:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def doubled_tuples():
    """{a tuple of two tuples, each of two, 60 deep: 0} in 500 bytes."""
    tuples = b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    return b"\x80\x02})q\x00" + tuples + b"K\x00s."


MADE = {
    "a model of tensors that are one number": expanded,
    "compressed": lambda path, state: rezipped(path, state, compressed),
    "nested": with_pickle(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
    "nested dicts": changed("config", n_layer=nested(300)),
    "tuples as keys": with_pickle(doubled_tuples()),
    "deep tuples as keys": with_pickle(b"\x80\x02})" + b"\x85" * 10**6 + b"K\x00s."),
    "an integer of 255 bytes": with_pickle(b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b"."),
    "an integer of 2 GB": with_pickle(b"\x80\x02\x8b\xff\xff\xff\x7f."),
    "bytearray": with_pickle(pickle.dumps(Call(bytearray, (10**11,)), 2)),
    "code": with_pickle(pickle.dumps(Call(os.mkdir, ("executed",)), 2)),
    "a storage": with_pickle(pickle.dumps(Call(torch.FloatStorage, (10**12,)), 2)),
    "no stop": with_pickle(b"\x80\x02]"),
    "a stack that is empty": with_pickle(b"\x80\x02."),
    "version": lambda path, state: torch.save({**state, "format_version": nested(60, pair=True)}, path),
    "a weight missing": without("model", "norm.weight"),
    "a weight too many": changed("model", other=torch.ones(3)),
    "a weight of another type": changed("model", **{"norm.weight": torch.ones(32, dtype=torch.float64)}),
    "a weight of another shape": changed("model", **{"norm.weight": torch.ones(33)}),
    "a weight that is a list": changed("model", **{"norm.weight": [1.0] * 32}),
    "no step": without("progress", "step"),
    "a step of another type": changed("progress", step=6.0),
    "a step before the first": changed("progress", step=-3),
    "a loss of another type": changed("progress", best_val_loss=nested(60, pair=True)),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_file_made_to_do_harm_is_refused(made, refuses):
    refuses(made)
    assert not Path("executed").exists()


def optimizer_state(**changes):
    def write(path, state):
        state["optimizer"][0] = {**state["optimizer"][0], **changes}
        torch.save(state, path)

    return write


LEARNED = {
    "nothing learned": lambda path, state: torch.save({**state, "optimizer": {}}, path),
    "a parameter missing": without("optimizer", 0),
    "a parameter too many": changed("optimizer", **{"99": {}}),
    "a parameter that is a list": lambda path, state: torch.save({**state, "optimizer": {0: []}}, path),
    "an entry too many": optimizer_state(more=torch.ones(1)),
    "another shape": optimizer_state(exp_avg=torch.ones(3)),
    "another type": optimizer_state(exp_avg_sq=1.0),
    "no generator": without("generators", "cpu"),
    "a generator of another size": changed("generators", cpu=torch.zeros(1, 7, dtype=torch.uint8)),
    "a generator of another type": changed("generators", cpu=torch.zeros(1, 5056)),
    "a generator of zeros": changed("generators", cpu=torch.zeros(1, 5056, dtype=torch.uint8)),
    "a generator that is text": changed("generators", cpu="random"),
}


@pytest.mark.parametrize("made", LEARNED.values(), ids=LEARNED)
def test_what_does_not_fit_the_optimizer_or_the_generators_is_refused(made, refuses):
    refuses(made, only_resuming=True)


def test_another_optimizers_state_is_refused(runs, tmp_path, refused):
    whole, six, _ = runs
    shutil.copytree(six.out_dir, tmp_path / "run")
    config = replace(whole, out_dir=str(tmp_path / "run"), init_from="resume", optimizer="sgd")
    line = refused(train.main, *(f"--{key}={value}" for key, value in vars(config).items()))
    assert "optimizer" in line


@pytest.mark.parametrize("scaler", [{}, {"scale": "x"}, {"scale": 1.0}])
def test_a_scaler_that_does_not_fit_is_refused(scaler, dense, tmp_path, refused):
    config = tiny(dataset=str(dense), out_dir=str(tmp_path), dtype="float16", attention="sdpa", max_steps=2)
    train.train(config)
    path = tmp_path / "last.pt"
    torch.save({**saved(config), "scaler": {**scaler, "more": 1}}, path)
    later = replace(config, max_steps=3, init_from="resume")
    assert "scaler" in refused(train.main, *(f"--{key}={value}" for key, value in vars(later).items()))
