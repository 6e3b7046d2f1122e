import io
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from conftest import ROOT, flags, replace, rows, tiny
from PIL import Image

import train
from nanoladder.config import Config, ladder_table
from nanoladder.run import metrics, trackers
from nanoladder.run.plot import plot


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), save_interval=2)


def words(config, **overrides):
    return flags(**{**vars(config), **overrides})


# -- any tracker


class Recorder:
    """A dashboard that keeps what it gets in `calls`; fails or hangs in the method named by `trouble`."""

    calls, trouble, module = [], None, "json"

    def __init__(self, config, start_step):
        self.take("__init__", config.out_dir, start_step)

    def log(self, row):
        self.take("log", row)

    def finish(self, picture, failed):
        self.take("finish", picture, failed)

    def take(self, *call):
        self.calls.append(call)
        if self.trouble == call[0]:
            self.misbehave()


def fail():
    raise ConnectionError("no route\nto host")


@pytest.fixture
def dashboard(monkeypatch):
    """dashboard(trouble=method, misbehave=function) -> a Recorder in place of wandb."""

    def install(trouble=None, misbehave=None):
        kind = type("Dashboard", (Recorder,), {"calls": [], "trouble": trouble, "misbehave": staticmethod(misbehave)})
        monkeypatch.setitem(trackers.DASHBOARDS, "wandb", kind)
        return kind

    return install


def test_without_trackers_none_is_imported(config):
    code = f"import sys, train; train.main({words(config)!r}); print({{'wandb', 'tensorboard'}} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", trackers.DASHBOARDS)
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(name, config, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, trackers.DASHBOARDS[name].module, None)
    line = refused(train.main, *words(config, track=name))
    assert f"track={name}" in line and f"pip install {name}" in line and "--track=off" in line
    assert not Path(config.out_dir).exists()


def test_a_tracker_gets_every_row_and_the_picture(config, dashboard):
    calls = dashboard().calls
    train.train(replace(config, track="wandb", eval_interval=2))
    begun, *logged, finished = calls
    assert begun == ("__init__", config.out_dir, 0)
    assert logged == [("log", row) for row in rows(config)] and len(logged) == 6
    assert finished == ("finish", Path(config.out_dir, "loss.png"), False)


def test_a_tracker_hears_of_a_crash(config, dashboard, monkeypatch):
    calls = dashboard().calls
    monkeypatch.setattr(train, "evaluate", lambda *_: fail())
    with pytest.raises(ConnectionError):
        train.train(replace(config, track="wandb", eval_interval=4))
    assert calls[-1] == ("finish", None, True) and len(calls) == 1 + 3 + 1


@pytest.mark.parametrize("trouble", ["__init__", "log", "finish"])
def test_a_tracker_that_fails_is_a_warning(trouble, config, dashboard, run_main):
    calls = dashboard(trouble, fail).calls
    result = run_main(train.main, *words(config, track="wandb"))
    assert result.code == 0 and len(rows(config)) == 6
    assert result.err == "warning: wandb failed, but training did not: no route to host\n"
    assert calls[-1][0] == trouble  # and is not called again


@pytest.mark.parametrize("trouble", ["__init__", "log", "finish"])
def test_a_tracker_that_hangs_does_not_hold_up_the_run(trouble, config, dashboard, run_main, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.01)
    end = threading.Event()
    dashboard(trouble, end.wait)
    result = run_main(train.main, *words(config, track="wandb"))
    end.set()
    assert result.code == 0 and len(rows(config)) == 6
    assert "warning: wandb has not answered" in result.err


def test_the_ladders_table_has_every_stage_and_the_values_of_the_run():
    lines = ladder_table(Config(dtype="float16")).splitlines()
    assert "| amp | dtype | 'float32' | 'auto' | 'float16' | Matrix products and stored activations are in half" in (
        next(line for line in lines if line.startswith("| amp"))
    )
    assert len(lines) == 2 + len(list(ROOT.glob("config/stages/*.py"))) - 1
    assert len({line.count("|") for line in lines}) == 1


# -- wandb


@pytest.fixture
def wandb(monkeypatch):
    """A fake wandb: calls of init() in `begun`, its rows in `logged`; `key`, `answers`, `accepts` may be False."""
    fake = SimpleNamespace(begun=[], logged=[], key=True, answers=True, accepts=True)

    class Artifact:
        def __init__(self, name, type):
            self.files = {}

        def new_file(self, name, encoding):
            self.files[name] = file = io.StringIO()
            return file

        def add_file(self, path, name):
            self.files[name] = path

    def setup(settings):
        return SimpleNamespace(settings=SimpleNamespace(mode="online", base_url="https://wandb.test"))

    def head(url, timeout):
        assert url == "https://wandb.test" and timeout == trackers.NETWORK_TIMEOUT
        if not fake.answers:
            fail()

    def login(prompt, verify):
        assert not prompt and not verify
        return fake.key

    def init(**given):
        mode = given["settings"].get("mode", "online")
        fake.begun.append({**given, "mode": mode})
        if mode == "online" and not fake.accepts:
            raise PermissionError("not yours")
        return SimpleNamespace(
            log=lambda row, step=None: fake.logged.append((step, row)),
            log_artifact=lambda artifact: fake.logged.append(artifact.files),
            finish=lambda exit_code: fake.logged.append(exit_code),
            settings=SimpleNamespace(sync_dir="run-1"),
            offline=mode == "offline",
            url="https://wandb.test/run-1",
        )

    vars(fake).update(setup=setup, login=login, init=init, Artifact=Artifact, Settings=dict, Image=str)
    fake.teardown = lambda: fake.begun.append("teardown")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("requests.head", head)
    return fake


def test_wandb_gets_the_config_the_rows_the_picture_and_the_table(wandb, config, run_main):
    result = run_main(train.main, *words(config, track="wandb", wandb_project="family", eval_interval=2))
    (begun,) = wandb.begun
    assert begun["project"] == "family" and begun["name"] == "run" and begun["dir"] == config.out_dir
    assert begun["config"]["n_embd"] == 32 and begun["config"].keys() == vars(config).keys()
    *logged, picture, artifact, exit_code = wandb.logged
    assert [{"step": step, **row} for step, row in logged] == rows(config)
    assert picture == (None, {"curves": str(Path(config.out_dir, "loss.png"))})
    assert "ladder.md" in artifact and any(name.startswith("results/") for name in artifact)
    assert exit_code == 0 and "wandb: https://wandb.test/run-1\n" in result.out and result.err == ""


def test_wandb_names_a_run_in_the_current_folder_after_it(wandb, config, run_main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_main(train.main, *words(config, track="wandb", out_dir="."))
    assert wandb.begun[0]["name"] == tmp_path.name


def test_a_resumed_run_continues_the_same_wandb_run_and_a_replaced_one_does_not(wandb, config):
    for more in ({}, {"init_from": "resume", "max_steps": 8}, {"overwrite": True}):
        train.train(replace(config, track="wandb", **more))
    first, resumed, replaced = wandb.begun
    assert first["id"] == resumed["id"] != replaced["id"] and resumed["resume"] == "allow"
    steps = [entry[0] for entry in wandb.logged if isinstance(entry, tuple) and entry[0]]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"wandb": 3}', '{"wandb": "../x"}'])
def test_a_damaged_id_is_replaced(text, tmp_path):
    path = tmp_path / "trackers.json"
    path.write_text(text)
    found = trackers.run_id_of(tmp_path, 3)
    assert json.loads(path.read_text()) == {"wandb": found} and trackers.run_id_of(tmp_path, 3) == found


@pytest.mark.parametrize(
    "lacking, reason",
    [
        ("key", "no API key; `wandb login` stores one"),
        ("answers", "no route to host"),
        ("accepts", "not yours"),
    ],
)
def test_wandb_that_cannot_be_reached_records_offline(lacking, reason, wandb, config, run_main):
    setattr(wandb, lacking, False)
    result = run_main(train.main, *words(config, track="wandb"))
    assert result.code == 0 and f"recorded offline: {reason}\n" in result.err and "wandb sync run-1" in result.out
    *failed, begun = wandb.begun
    assert begun["settings"] == {"silent": True, "mode": "offline"}  # with none of the network's limits
    assert [row[0] for row in wandb.logged[:6]] == [1, 2, 3, 4, 5, 6]
    if lacking == "accepts":
        refused, torn_down = failed
        assert refused["id"] == begun["id"] and torn_down == "teardown"  # wandb would say that the id is in use
    else:
        assert not failed


def test_a_certificate_is_wandbs_to_judge(wandb, config, monkeypatch):
    def head(url, timeout):
        raise requests.exceptions.SSLError("self-signed")

    monkeypatch.setattr(requests, "head", head)
    train.train(replace(config, track="wandb"))
    assert [begun["mode"] for begun in wandb.begun] == ["online"]


def test_a_tracker_that_exits_is_a_warning(config, dashboard, run_main):
    dashboard("finish", sys.exit)
    assert "warning: wandb failed, but training did not" in run_main(train.main, *words(config, track="wandb")).err


def recorded(out_dir):
    """Returns the records of the run's newest .wandb file, as (kind, message): a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(out_dir, "wandb", "latest-run").glob("run-*.wandb")
    data, offset, whole, found = path.read_bytes(), 7, b"", []
    assert data.startswith(b":W&B")
    while offset + 7 <= len(data):
        if (left := 32768 - offset % 32768) < 7:  # the rest of a block
            offset += left
            continue
        _, size, part = struct.unpack("<IHB", data[offset : offset + 7])
        whole, offset = whole + data[offset + 7 : offset + 7 + size], offset + 7 + size
        if part in (1, 4):  # whole, last
            record, whole = Record.FromString(whole), b""
            kind = record.WhichOneof("record_type")
            found.append((kind, getattr(record, kind)))
    return found


def history(records):
    """Returns the rows in a .wandb file, with their step."""
    items = [record.item for kind, record in records if kind == "history"]
    found = [{"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in items]
    return [{"step": row["_step"], **{key: value for key, value in row.items() if key[0] != "_"}} for row in found]


def run_python(code, **environment):
    environment = {**os.environ, "WANDB_DATA_DIR": "", **environment}
    return subprocess.run(
        [sys.executable, "-c", f"import train\nfrom nanoladder.run import trackers\n{code}"],
        cwd=ROOT,
        env={key: value for key, value in environment.items() if value},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_wandb_offline_for_real(config, tmp_path):
    given = words(config, track="wandb", eval_interval=3)
    folders = {key: str(tmp_path / "wandb") for key in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    first = run_python(f"train.main({given!r})", WANDB_MODE="offline", **folders)
    assert first.returncode == 0 and "wandb sync" in first.stdout, first.stderr
    records = recorded(config.out_dir)
    (run,) = [record for kind, record in records if kind == "run"]
    assert {item.key: item.value_json for item in run.config.update}["n_embd"] == "32"
    assert run.project == "nanoladder" and run.display_name == "run"
    *logged, last = history(records)
    assert [*logged, {key: value for key, value in last.items() if key in rows(config)[-1]}] == rows(config)
    assert any("curves" in key for key in last)
    assert [record.name for kind, record in records if kind == "artifact"] == ["ladder"]

    again = run_python(
        f"train.main({[*given, '--init_from=resume', '--max_steps=8']!r})", WANDB_MODE="offline", **folders
    )
    assert again.returncode == 0, again.stderr
    records = recorded(config.out_dir)
    assert [record.run_id for kind, record in records if kind == "run"] == [run.run_id]
    assert [row["step"] for row in history(records)] == [7, 8]


@pytest.mark.slow
def test_a_server_that_never_answers(config, tmp_path):
    folders = {key: str(tmp_path / "wandb") for key in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and that is all
        result = run_python(
            f"trackers.NETWORK_TIMEOUT = 1; train.main({words(config, track='wandb')!r})",
            WANDB_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}",
            WANDB_API_KEY="0" * 40,
            WANDB_MODE="",
            **folders,
        )
    assert result.returncode == 0 and len(rows(config)) == 6, result.stderr
    assert "warning: wandb cannot be reached" in result.stderr
    assert [row["step"] for row in history(recorded(config.out_dir))] == [1, 2, 3, 4, 5, 6], result.stderr


# -- TensorBoard


@pytest.fixture
def no_picture(monkeypatch):
    """Draws one pixel."""
    monkeypatch.setattr(metrics, "plot", lambda rows, path, title: Image.new("RGB", (1, 1)).save(path))


def events(config):
    """Reads the event files in out_dir as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(config.out_dir, size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def scalars(found, key):
    return [(event.step, event.value) for event in found.Scalars(f"metrics/{key}")]


def logged(config, key):
    return [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows(config) if key in row]


def test_tensorboard_gets_the_config_the_rows_the_picture_and_the_table(config, monkeypatch, run_main):
    monkeypatch.setattr(metrics, "plot", plot)
    result = run_main(train.main, *words(config, track="tensorboard", eval_interval=3, sample_interval=3))
    found = events(config)
    keys = {key for row in rows(config) for key in row} - {"step", "sample"}
    assert set(found.Tags()["scalars"]) == {f"metrics/{key}" for key in keys} and "val_bpb" in keys
    assert all(scalars(found, key) == logged(config, key) for key in keys)
    texts = {name: found.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("config", "ladder")}
    assert b"| n_embd | 32 |" in texts["config"] and b"| amp | dtype |" in texts["ladder"]
    written = [
        (event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors("sample/text_summary")
    ]
    assert written == [(row["step"], textwrap.indent(row["sample"], "    ")) for row in rows(config)[2::3]]
    (picture,) = found.Images("curves")
    assert picture.step == 6 and picture.encoded_image_string.startswith(b"\x89PNG")
    assert f"tensorboard --logdir {config.out_dir}" in result.out


def test_a_resumed_run_has_no_step_twice_on_tensorboard(config, no_picture):
    config = replace(config, track="tensorboard", learning_rate=0.1, keep_checkpoints=9)
    train.train(config)
    for name in ("last", "step_00000006"):  # as if the run had been killed before it saved
        Path(config.out_dir, f"{name}.safetensors").unlink()
    resumed = replace(config, init_from="resume", learning_rate=0.01, max_steps=8)
    train.train(resumed)
    found = scalars(events(config), "lr")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6, 7, 8] and found == logged(config, "lr")


def test_a_run_that_replaces_another_hides_it_on_tensorboard(config, no_picture):
    train.train(replace(config, track="tensorboard"))
    train.train(replace(config, track="tensorboard", overwrite=True, max_steps=3))
    assert scalars(events(config), "train_loss") == logged(config, "train_loss")
    assert len(rows(config)) == 3


def test_both_at_once(wandb, config, no_picture):
    train.train(replace(config, track="tensorboard,wandb"))
    assert len(wandb.logged) == 6 + 3 and len(scalars(events(config), "train_loss")) == 6
