"""Records: entries of the race are read, compared and checked; one that breaks a rule is refused in one line."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import MACHINE, ROOT, TINY, write_folder
from processes import forked, python

import ladder
from lab.research import race, records, referee

TASK = {**TINY, "dataset": "tiny", "eval_interval": 6, "eval_windows": 2, "save_interval": 0}
HEAD = "# Something new\n\nBy A. Nother, 2026-11-26.\n"
FASTER = {"001_naive": 100.0, "002_known": 50.0, "003_new": 40.0}
SECONDS_OFF = [0.0, 0.5, -0.4, 0.3, -0.2]
LOSS_OFF = [0.0, 0.001, -0.001, 0.002, -0.002]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A repository with this code and the records 001_naive and 002_known, of a tiny model."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("operators", "nanoladder", "lab", "config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "data" / "tiny").mkdir(parents=True)
    (folder / "data" / "tiny" / "prepare.py").touch()
    for name, rate in ("001_naive", 1e-2), ("002_known", 2e-2):
        write_entry(folder / "records" / name, learning_rate=rate)
    for words in ["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "all"]:
        subprocess.run(["git", *words], cwd=folder, check=True)
    pattern = np.arange(64) % 7  # so regular that six steps learn some of it
    write_folder(folder / "data" / "tiny", np.tile(pattern, 40), np.tile(pattern, 4), 64)
    return folder


@pytest.fixture
def at_home(house, monkeypatch):
    """Uses the house for the records and copies of this process; removes new entries at the end."""
    monkeypatch.setattr(records, "RECORDS", house / "records")
    monkeypatch.setattr("lab.measure.git.ROOT", house)
    monkeypatch.setattr("nanoladder.data.datasets.DATA_DIR", house / "data")
    monkeypatch.setattr(referee, "run_alone", lambda *_: MACHINE | {"threads": 2})
    yield house
    for path in (house / "records").glob("003*"):
        shutil.rmtree(path)


def write_entry(folder, text=HEAD, patch=None, **changes):
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(text)
    (folder / "config.py").write_text("".join(f"{key} = {value!r}\n" for key, value in (TASK | changes).items()))
    if patch:
        (folder / "new.patch").write_text(patch)
    return folder


def patch_of(path, old, new):
    """A patch that replaces a line of a file."""
    lines = (ROOT / path).read_text().splitlines()
    (n,) = (n for n, line in enumerate(lines) if line.strip() == old)
    indent = lines[n][: len(lines[n]) - len(old)]
    around = [f" {lines[n - 1]}", f"-{lines[n]}", f"+{indent}{new}", f" {lines[n + 1]}"]
    return "\n".join([f"--- a/{path}", f"+++ b/{path}", f"@@ -{n},3 +{n},3 @@", *around, ""])


def read_configs_in_forks(monkeypatch):
    """Saves the referee's processes their imports. The server of forks, once started, keeps its temporary folder."""
    python("-c", "")  # not within a check, which removes the temporary folder that it sets
    monkeypatch.setattr(referee, "subprocess", SimpleNamespace(run=forked))


def planted(monkeypatch, notes="", shuffled=0.5, **losses):
    """Replaces runs by figures: seconds of FASTER and these losses, each with a little noise of its seed.

    notes: what the watched run leaves. shuffled: how much higher it ends.
    """
    began, seeds = [], []

    def run(words, script):
        watched = script.name == "witness.py"  # always of the entry
        name = "003_new" if watched else script.parent.name
        seed = int(words[-1].removeprefix("--seed="))
        seeds.extend([] if seed in seeds else [seed])
        n = seeds.index(seed)
        began.append((name, n))
        bpb = losses.get(name, 2.0) + (shuffled if watched else 0.0) + LOSS_OFF[(2 * n) % 5]
        if watched:
            Path(words[0]).write_text(notes)
        return {"seconds": FASTER[name] + SECONDS_OFF[n], "tokens": 384, "bpb": bpb, "curve": [[1, 3.0], [2, bpb]]}

    monkeypatch.setattr(race, "run", run)
    monkeypatch.setattr(referee, "require_seeded", lambda *_: None)
    read_configs_in_forks(monkeypatch)
    return began


@pytest.fixture
def check(at_home, run_main):
    """check(*words) runs `ladder.py check` of records/003_new."""
    return lambda *words: run_main(ladder.main, "check", str(at_home / "records" / "003_new"), *words)


@pytest.mark.slow
def test_an_entry_that_is_faster_to_the_same_loss_holds_and_a_check_resumes(at_home, check, monkeypatch):
    folder, began = write_entry(at_home / "records" / "003_new", activation="relu2"), planted(monkeypatch)
    assert check("--seeds=3").code == 1 and len(began) == 1 + 3 * 3
    done = check()
    assert done.code == 0 and len(began) == 1 + 5 * 3 and "003_new holds (p = " in done.out and "2.5" in done.out
    turns = [name for name, _ in began[:4]]
    assert turns == ["003_new", "003_new", "002_known", "001_naive"]  # the second is watched
    entry = records.read_entry(folder)
    (results,) = entry.results().values()
    assert {run["seed"] for run in results["runs"]} == set(entry.seeds(5))
    assert "holds" in records.table() and "author" not in records.table()
    records.draw(at_home / "records.png")
    assert (at_home / "records.png").stat().st_size > 1e4


def write_results(entry, **changes):
    """Writes what a check of 003_new leaves in an entry's folder; changes: other digests of the entries."""
    names = {each.name: each.digest for each in records.entries() if each.name < "003"} | {"003_new": entry.digest}
    lines = [
        {"name": name, "seed": seed, "figures": {"seconds": FASTER[name] + off, "tokens": 384, "bpb": 2.0}}
        for name in names
        for seed, off in zip(entry.seeds(5), SECONDS_OFF, strict=True)
    ]
    conditions = {"begin": records.CHECK, "machine": MACHINE | {"threads": 2}, "entries": names | changes}
    (entry.folder / "machine.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (conditions, *lines)))


def test_the_records_fit_a_terminal():
    text = records.on_terminal()
    assert max(map(len, text.splitlines())) <= 80 and "|" not in text
    for entry in records.entries():
        assert text.startswith(f"{entry.name}: ") or f"\n{entry.name}: " in text
    for machine, runs in records.measured().items():
        assert f"\n\n{machine}\n\n" in text
        assert all(f"\n{entry.name}: {records.verdict(results)[0]}" in text for entry, results in runs.items())


def test_a_check_says_first_what_it_will_do_and_how_long(monkeypatch):
    monkeypatch.setattr(records, "seconds", lambda: {"001_naive": 1200.0, "002_known": 60.0})
    said = (
        "003_new: the rules, within minutes; then 16 runs on 5 seeds, beside 002_known and 001_naive, about 1.9 hours "
    )
    assert referee.plan(["001_naive", "002_known", "003_new"], 5).startswith(said)
    assert "5 runs on 2 seeds, beside 002_known, about 5 minutes by" in referee.plan(["002_known", "003_new"], 2)
    monkeypatch.setattr(records, "seconds", dict)
    assert "beside 002_known. It can be" in referee.plan(["002_known", "003_new"], 2)


def test_the_picture_joins_only_entries_that_hold(at_home, drawn):
    folder = write_entry(at_home / "records" / "003_new", activation="relu2")
    write_results(records.read_entry(folder))
    for text, joined, note in (HEAD, [0, 2], "2.5×"), (f"{HEAD}\nRefused: it saw the seeds.\n", [0], "2.5× refused"):
        (folder / "README.md").write_text(text)
        records.draw(at_home / "records.png")
        (axis,) = drawn[-1].axes
        (line,) = [line for line in axis.lines if line.get_label().startswith("a CPU")]
        assert [*line.get_xdata()] == joined and note in [text.get_text() for text in axis.texts]
        low, high = next(line.get_ydata() for line in axis.lines if line.get_marker() == "_")
        assert low < 2.5 < high


def test_results_of_other_files_have_no_row_and_are_named(at_home):
    folder = write_entry(at_home / "records" / "003_new", activation="relu2")
    write_results(entry := records.read_entry(folder))
    assert "| 003_new " in records.table() and "machine.jsonl" not in records.table()
    shutil.copytree(folder, at_home / "records" / "003_other")
    (at_home / "records" / "003_other" / "config.py").write_text((folder / "config.py").read_text() + "seed = 7\n")
    text = records.table()
    assert "| 003_new " in text and "| 003_other " not in text
    assert "- [003_other](003_other/README.md)" in text and text.count("its machine.jsonl is not of these files") == 1
    for changed in ("001_naive", "002_known", "003_new"):
        write_results(entry, **{changed: "0" * 64})
        assert "| 003_new " not in records.table() and not records.measured()
    write_results(entry)
    (folder / "config.py").write_text((folder / "config.py").read_text() + "seed = 7\n")
    assert "| 003_new " not in records.table()


@pytest.mark.slow
def test_a_check_that_was_interrupted_before_the_naive_loop_ran_is_not_in_the_table(at_home, check, monkeypatch):
    folder = write_entry(at_home / "records" / "003_new", activation="relu2")
    planted(monkeypatch)
    monkeypatch.delitem(FASTER, "001_naive")  # its run fails
    with pytest.raises(KeyError):
        check()
    (results,) = records.read_entry(folder).results().values()
    assert len(results["runs"]) == 2
    assert "a CPU" not in records.table()


@pytest.mark.slow
@pytest.mark.parametrize("cheat", ["cores", "network", "validation"])
def test_an_entry_with_more_cores_the_network_or_a_validation_of_its_own_is_refused(cheat, at_home, check, monkeypatch):
    folder = write_entry(at_home / "records" / "003_new", activation="relu2")
    notes = "the network, 192.0.2.1\n" if cheat == "network" else ""
    planted(monkeypatch, notes, shuffled=0.0 if cheat == "validation" else 0.5)
    used = itertools.count(step=400.0 if cheat == "cores" else 1.0)  # CPU seconds; a run takes up to 100
    monkeypatch.setattr(referee, "cpu_seconds", lambda: next(used))
    done = check()
    said = {
        "cores": "003_new keeps 10.0 cores busy; expected the naive loop's 2",
        "network": "003_new connects to the network, 192.0.2.1; expected a run that needs none",
        "validation": "003_new: its validation loss is the same for shuffled tokens; expected a true one",
    }
    assert done.code == 2 and f"error: {said[cheat]}\n" in done.err
    assert not list(folder.glob("*.jsonl"))


def test_the_seeds_follow_from_what_runs(at_home):
    one = records.read_entry(write_entry(at_home / "records" / "003_new"))
    other = records.read_entry(write_entry(at_home / "records" / "003_other", n_head=4))
    assert one.seeds(5) == one.seeds(5) and not set(one.seeds(5)) & set(other.seeds(5))
    (one.folder / "README.md").write_text(HEAD + "more words\n")
    assert records.read_entry(one.folder).seeds(5) == one.seeds(5)


@pytest.mark.slow
def test_no_gain_and_a_missed_loss_are_verdicts(at_home, check, monkeypatch):
    folder = write_entry(at_home / "records" / "003_new")
    monkeypatch.setitem(FASTER, "003_new", 50.0)
    planted(monkeypatch)
    done = check()
    assert done.code == 1 and "003_new no gain on 002_known (p = " in done.out
    next(folder.glob("*.jsonl")).unlink()
    monkeypatch.setitem(FASTER, "003_new", 40.0)
    planted(monkeypatch, **{"003_new": 2.02})
    done = check()
    assert done.code == 1 and "003_new misses the loss (p = " in done.out
    assert "misses the loss" in records.table()  # it stays, marked
    later = records.read_entry(write_entry(at_home / "records" / "003_other"))
    assert records.before(later).name == "002_known"  # but the next one need not beat it


def test_a_refused_entry_stays_marked_and_is_not_the_record_to_beat(at_home):
    write_entry(at_home / "records" / "003_new", HEAD + "\nRefused: its weights came with it.\n")
    later = records.read_entry(write_entry(at_home / "records" / "003_other"))
    assert records.before(later).name == "002_known"
    assert records.read_entry(at_home / "records" / "003_new").refused == "its weights came with it."


HUNK = "--- a/{0}\n+++ b/{0}\n@@ -1,2 +1,2 @@\n-nothing\n+something\n like this\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": "something"}, "README.md: expected a title"),
        ({"patch": HUNK.format("train.py")}, "new.patch does not apply to this commit"),
        ({"patch": HUNK.format("lab/research/race.py")}, "it changes lab/research/race.py; expected"),
        ({"patch": HUNK.format("nanoladder/data/batches.py")}, "it changes nanoladder/data/batches.py"),
        ({"patch": HUNK.format("nanoladder/prepare/meta.py")}, "it changes nanoladder/prepare/meta.py"),
        ({"dataset": "text"}, "its config has dataset=text; expected the task's tiny"),
        ({"seed": 7}, "its config sets seed=7; expected none"),
        ({"nonsense": 1}, "its config cannot be read: "),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_invalid_entry_is_refused_in_one_line(changes, said, at_home, check, monkeypatch):
    read_configs_in_forks(monkeypatch)
    folder = write_entry(at_home / "records" / "003_new", **changes)
    before = sorted(folder.iterdir())
    done = check()
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_a_folder_without_a_readme_or_with_other_files_is_refused(at_home, check):
    folder = write_entry(at_home / "records" / "003_new")
    (folder / "weights.bin").touch()
    assert "003_new holds weights.bin; expected" in check().err
    (folder / "README.md").unlink()
    assert "has no README.md" in check().err
    shutil.rmtree(folder)
    assert "no such folder" in check().err


def test_another_evaluation_is_refused(at_home, check):
    patch = patch_of("train.py", "loss_sum, n_tokens = 0.0, 0", "loss_sum, n_tokens = 0.0, 1000")
    write_entry(at_home / "records" / "003_new", patch=patch)
    assert "it changes evaluate() of train.py" in check().err


# -- in processes of their own


@pytest.mark.slow
def test_an_honest_entry_keeps_the_rules(at_home, check, monkeypatch):
    monkeypatch.setattr(referee, "FEW", 1)
    folder = write_entry(at_home / "records" / "003_new", position="rotary")
    done = check("--quick")
    assert done.code == 0 and "003_new keeps the rules" in done.out and "times faster than 002_known" in done.out
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.py"]


DRAW = 'generator = torch.Generator().manual_seed(crc32(f"{self.config.seed} {name}".encode()))  # one per name'
STEPS = "for step, batch in run.steps(training_batches(dataset.train, config, run.first_step, device)):"
BUILD = "model = build_model(config, device)"
CHEATS = {  # {what is cheated with: (file, a line of it, its replacement, part of the refusal)}
    "seed": ("model.py", DRAW, DRAW.replace("{self.config.seed}", "7"), ": its weights are the same for each seed"),
    "validation": ("train.py", STEPS, STEPS.replace("train,", "val,"), ": its training losses depend on the valid"),
    "file": ("train.py", BUILD, f"{BUILD}; open({str(ROOT / 'LICENSE')!r})", f" reads {ROOT / 'LICENSE'}; expected"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHEATS)
def test_a_cheat_is_refused(kind, at_home, check, monkeypatch):
    *change, said = CHEATS[kind]
    folder = write_entry(at_home / "records" / "003_new", patch=patch_of(*change))
    if kind != "seed":
        monkeypatch.setattr(referee, "require_seeded", lambda *_: None)  # saves two processes
        read_configs_in_forks(monkeypatch)  # and what a third would import
    done = check("--quick")
    assert done.code == 2 and f"error: 003_new{said}" in done.err
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.py", "new.patch"]


def test_packages_may_be_read_by_either_name_of_a_linked_environment(tmp_path, monkeypatch):
    entry = SimpleNamespace(folder=tmp_path / "records" / "003_new")
    (tmp_path / "environment").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "environment")
    monkeypatch.setattr(referee, "sys", SimpleNamespace(prefix=str(tmp_path / "link"), base_prefix="/usr"))
    monkeypatch.setattr(referee.tempfile, "tempdir", str(tmp_path / "check"))
    folders = referee.readable(entry)
    assert str(tmp_path / "link") in folders and str(tmp_path / "environment") in folders
    assert not any((tmp_path / "data").is_relative_to(folder) for folder in folders)


def test_tried_lists_what_ended_higher_and_no_earlier(monkeypatch, tmp_path):
    fast, slow, worse = ("fast", 2.0, 30.0), ("slow", 1.8, 60.0), ("worse", 1.9, 70.0)
    lines = [{"begin": "tried"}]
    for name, bpb, seconds in (fast, slow, worse):
        row = {"preset": "laptop", "seed": 0, "keys": {"norm": name}, "prototype": {}}
        lines.append(row | {"figures": {"val_bpb": bpb, "seconds": seconds}})
    path = tmp_path / "machine" / "laptop" / "tried.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert [line for line in records.tried().splitlines() if "laptop" in line] == [
        "| laptop | norm=worse | 1.9000 | 1.8000 |"
    ]
