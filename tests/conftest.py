"""Shared fixtures and helpers: a tiny config, small datasets, and an in-process command line."""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.utils._pytree import tree_leaves, tree_map_only

import train
from nanoladder import checkpoint, config, entry, files, machine
from nanoladder.checkpoint.format import flatten, unflatten, write_checkpoint
from nanoladder.checkpoint.slices import Sliced
from nanoladder.checkpoint.state import plain_parts
from nanoladder.config import Config
from nanoladder.errors import BadInput
from nanoladder.prepare.meta import FORMAT_VERSION, sample_digest
from nanoladder.run import metrics
from nanoladder.tokenizer.encoding import build_tokenizer, encode, save_tokenizer

torch.set_num_threads(1)  # the models here are too small for more
os.environ.pop("PYTHONSAFEPATH", None)  # children here find our modules in their working directory
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise every process that compiles starts two more: 6 s
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it once, and some tests here are deterministic
settings.register_profile("quiet", deadline=None, max_examples=20, database=None, derandomize=True)
settings.load_profile("quiet")

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.gpu  # pytest -m gpu runs these alone
needs_rustbpe = pytest.mark.skipif(find_spec("rustbpe") is None, reason="needs rustbpe: pip install rustbpe")
MACHINE = {"cpu": "a CPU", "threads": 4, "native_bfloat16": True, "gpu": None, "datasheet_flops": None, "torch": "2.13"}
LINE = "the cat sat on the mat, naïve at the café ☕\n"
LOGGED = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm"  # independent of the clock
TINY = {
    "device": "cpu",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "context_length": 16,
    "batch_size": 4,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 2,
    "log_interval": 1,
    "eval_interval": 0,
    "save_interval": 100,  # at the end
}
RECIPE = {  # every rung of the second ladder
    "optimizer": "muon",
    "position": "rotary",
    "qk_norm": True,
    "key_offset": True,
    "exclusive_attention": True,
    "activation": "relu2",
    "zero_init": True,
    "schedule": "trapezoid",
    "tie_embeddings": False,
    "embedding_lr": 4.0,
    "head_lr": 0.5,
    "sampled_softmax": 999,  # all of a tiny vocabulary: the exact loss
    "scalar_lr": 2.0,
    "x0_skip": True,
    "embedding_norm": True,
    "smear": True,
    "split_qkv": True,
    "polar_express": True,
    "value_embedding": True,
}
# Supported by tensor parallelism
UNCUT = {**RECIPE, "x0_skip": False, "value_embedding": False, "smear": False, "sampled_softmax": 0}
config.read_file(config.STAGES_DIR / "00_naive.py", TINY, given={})  # every optimization off


class FakeTurns(contextlib.nullcontext):
    """A launch.Processes, or Command, whose turns all give the same figures, those of figures()."""

    def __init__(self):
        super().__init__(self)

    def answer(self):
        self.found = self.figures()
        return self.found

    def ask(self, seconds):
        return self.found | {"waited": 0.0}

    def end(self):
        return self.found

    def kill(self):
        pass


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # full collections no longer scan what was imported


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def tiny(**overrides):
    """Config of the naive loop whose model and run take milliseconds."""
    return Config(**{**TINY, **overrides})


def run_interpreted(file):
    """Runs a test file as a script in Triton's interpreter, which must be enabled before Triton is imported."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    result = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def with_torchao(names):
    """Names of stages or optimizers as pytest parameters; without torchao, skips the ones that need it."""
    lacking = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install torchao")
    return [pytest.param(name, marks=[lacking] * (name in ("low_memory_optimizer", "adamw8bit"))) for name in names]


def flags(**overrides):
    """Command-line arguments for tiny(**overrides)."""
    return [f"--{key}={value}" for key, value in {**TINY, **overrides}.items()]


def words(config, **overrides):
    """Command-line arguments for a config."""
    return [f"--{key}={value}" for key, value in {**vars(config), **overrides}.items()]


def write_folder(folder, train, val, vocab_size, dtype="uint16", encoding=None, **meta):
    """Writes a prepared dataset. train, val: token ids, or one list of ids for each document."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    if encoding:
        save_tokenizer(encoding, folder)
    documents = isinstance(train[0], list)
    splits = {"train": train, "val": val}
    for name, ids in splits.items():
        if documents:
            np.cumsum([0] + [len(document) for document in ids]).astype("<u8").tofile(folder / f"{name}.idx")
            splits[name] = ids = np.concatenate(ids)
        np.asarray(ids).astype(dtype).tofile(folder / f"{name}.bin")
    meta = {
        "format_version": FORMAT_VERSION,
        "tokenizer": "byte",
        "vocab_size": vocab_size,
        "dtype": dtype,
        "tokens": {name: len(ids) for name, ids in splits.items()},
        "bytes": {name: 2 * len(ids) for name, ids in splits.items()},
        "digests": {path.name: sample_digest(path) for path in folder.iterdir()},
        "documents": documents,
        **meta,
    }
    (folder / "meta.json").write_text(json.dumps(files.seal(meta)), encoding="utf-8")
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures that matplotlib saves, in order; nothing is rendered."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Path of the ladder as a page, which the first test process that needs it builds for all."""
    from lab.programs.html import build  # what few tests need

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path = folder / "pages" / "index.html"
    while not path.exists():
        with contextlib.suppress(BlockingIOError), files.hold(folder / "pages.lock"):
            build.write(path)
        time.sleep(0.1)  # another process may be building it
    return path


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """Dataset of characters in one stream: one line, repeated."""
    folder = tmp_path_factory.mktemp("data") / "dense"
    tokenizer = build_tokenizer("char", [LINE])
    train, val = (encode(tokenizer, LINE * times) for times in (30, 8))
    return write_folder(folder, train, val, tokenizer.n_vocab, encoding=tokenizer, tokenizer="char")


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """Dataset of documents of 2 to 40 bytes, some shorter and some longer than a tiny context."""
    folder = tmp_path_factory.mktemp("data") / "documents"
    rng = np.random.default_rng(0)
    train, val = ([rng.integers(0, 256, rng.integers(2, 41)).tolist() for _ in range(n)] for n in (30, 7))
    return write_folder(folder, train, val, 256, encoding=build_tokenizer("byte"))


@pytest.fixture(autouse=True, scope="session")
def no_plot_and_no_wait_for_the_disk():
    """Disables both, as either takes longer than a tiny run; tests of the plot and of files.py patch in their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *_: None)
        patch.setattr(os, "fsync", lambda descriptor: None)  # the kernel keeps what a killed process wrote
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory, dense):
    """Config of a run on characters, long enough to begin to learn its line. Read-only."""
    keys = {"max_steps": 30, "batch_size": 8, "eval_interval": 10, "eval_windows": 0}  # with a best checkpoint
    config = tiny(dataset=str(dense), out_dir=str(tmp_path_factory.mktemp("run")), **keys)
    train.train(config)
    return config


@pytest.fixture(autouse=True)
def process():
    """Resets what training sets for the whole process: hypothesis objects to flushed denormals."""
    yield
    torch.set_flush_denormal(False)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # imports the compiler: 2 s
    for enable in machine.ATTENTION_KERNELS.values():
        enable(True)


@pytest.fixture
def traced():
    """Makes torch.compile trace, differentiate and partition as usual, but generate no code, which saves seconds."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield


@pytest.fixture
def interruptible():
    """Lets Ctrl-C reach this process and its children, which ignore it if the tests are a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fresh_gpu():
    """Frees the GPU memory of earlier tests: compiled graphs, garbage, cuBLAS workspaces."""
    torch.compiler.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()


@pytest.fixture
def run_main(monkeypatch, capsys):
    """run_main(main, *words) runs a command line in this process, as its script would; returns code, out and err."""

    def run(main, *words):
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            entry.run_script(main)
        except SystemExit as exit:
            code = exit.code or 0
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def refused(run_main):
    """refused(main, *words) asserts that a command line is bad input; returns the one-line error message."""

    def refuse(main, *words):
        result = run_main(main, *words)
        assert result.code == 2 and result.out == ""
        assert result.err.startswith("error: ") and result.err.count("\n") == 1 and result.err.endswith("\n")
        return result.err

    return refuse


def refusal(function, *args, **kwargs):
    """The message of the BadInput that a call raises, one line."""
    with pytest.raises(BadInput) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder):
    """{path within the folder: bytes} of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


class Call:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def rows(config, *keys):
    """Rows of a run's metrics.jsonl. keys: the only ones to return, such as those that do not depend on the clock."""
    lines = (Path(config.out_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    return [{key: row[key] for key in keys if key in row} for row in logged] if keys else logged


def weights(config, name="last"):
    """Weights in a run's checkpoint, as a state dict for load_state_dict."""
    state = saved(config, name)["model"]
    return {**state, "head.weight": state["token_embedding.weight"]}  # tied: stored once


def saved(config, name="last"):
    """A run's checkpoint as a nested dict, with its tensors copied into memory."""
    return in_memory(checkpoint.load(Path(config.out_dir) / f"{name}.safetensors"))


def in_memory(state):
    """A checkpoint's dict with copies of its tensors, and with whole ones in place of those in slices."""
    return tree_map_only((torch.Tensor, Sliced), lambda tensor: tensor[...].clone(), state)


def write_state(path, state):
    """Writes a checkpoint's dict, whose tensors may be mapped from the file at that path."""
    tensors, values = flatten(state)
    with files.writing(path) as file:
        write_checkpoint(file, values, tensors, sorted(tensors.items()))


def whole(values, tensors):
    """Builds a checkpoint's dict from what checkpoint.snapshot() returns."""
    return unflatten(dict(tensors), values)


def same(ours, theirs):
    """True if two state dicts, or nested dicts of tensors, are equal bit for bit."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def assert_same_state(ours, theirs, *parts, name="last"):
    """Asserts that parts of two runs' checkpoints are equal bit for bit; by default, all parts that resuming uses."""
    one, other = saved(ours, name), saved(theirs, name)
    for part in parts or ("model", "optimizer", "scaler", "generators", "progress"):
        assert same(one[part], other[part]), (name, part)


def spy(monkeypatch, owner, name, record):
    """Replaces owner.name by itself, after record(*args, **kwargs) has seen the call."""
    original = getattr(owner, name)

    def spied(*args, **kwargs):
        record(*args, **kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, spied)


def at_step(number, action):
    """Wraps train.train_step to call action(model, batch) first at step `number`, counted from 1."""
    original, numbers = train.train_step, itertools.count(1)

    def step(model, optimizer, scaler, batch, lr, config):
        if next(numbers) == number:
            action(model, batch)
        return original(model, optimizer, scaler, batch, lr, config)

    return step


def spoil_positions(model, batch):
    model.position_embedding.weight.data[5] = math.nan


def state_bytes(optimizer):
    """Bytes of the tensors in an optimizer's state; 8-bit tensors count by their parts."""
    leaves = tree_leaves([plain_parts(value) for state in optimizer.state.values() for value in state.values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def build(config, device="cpu"):
    """The model, the optimizer and the scaler of a config, as train.train makes them."""
    device = torch.device(device)
    model = train.build_model(config, device)
    return model, train.build_optimizer(model, config), train.build_scaler(config, device)


def replace(config, **overrides):
    return dataclasses.replace(config, **overrides)
