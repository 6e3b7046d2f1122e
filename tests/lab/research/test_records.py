"""Records: entries of the race are read, compared and checked; one that breaks a rule is refused in one line."""

import json
import os
import shutil
import subprocess
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import MACHINE, ROOT, TINY, refusal, write_folder

import ladder
from lab.research import records, records_report, referee
from lab.research.session import Session

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
    (folder / "records" / "race").mkdir(parents=True)
    (folder / "records" / "race" / "README.md").write_text("# A race\n\nTarget: the naive loop's loss.\n")
    for name, rate in ("001_naive", 1e-2), ("002_known", 2e-2):
        write_entry(folder / "records" / "race" / name, learning_rate=rate)
    for words in ["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "all"]:
        subprocess.run(["git", *words], cwd=folder, check=True)
    pattern = np.tile(np.arange(64) % 7, 40)  # so regular that six steps learn some of it
    train, val = pattern.copy(), pattern[:256]
    train[100:150] = np.random.default_rng(0).integers(64, size=50)  # the second window that stands in for val's
    write_folder(folder / "data" / "tiny", train, val, 64)
    return folder


@pytest.fixture
def at_home(house, monkeypatch):
    """Uses the house for the records and copies of this process; removes new entries at the end."""
    monkeypatch.setattr(records, "RECORDS", house / "records")
    monkeypatch.setattr("lab.measure.git.ROOT", house)
    monkeypatch.setattr("nanoladder.data.datasets.DATA_DIR", house / "data")
    monkeypatch.setattr(referee, "run_alone", lambda *_: MACHINE | {"threads": 2})
    yield house
    for path in (house / "records" / "race").glob("003*"):
        shutil.rmtree(path)


def race():
    (only,) = records.races()
    return only


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


def planted(monkeypatch, **losses):
    """Replaces runs by figures: seconds of FASTER and these losses, each with a little noise of its seed."""
    began, seeds = [], []

    def run(_, copy, seed):
        seeds.extend([] if seed in seeds else [seed])
        n = seeds.index(seed)
        began.append((copy.name, n))
        bpb = losses.get(copy.name, 2.0) + LOSS_OFF[(2 * n) % 5]
        return {"seconds": FASTER[copy.name] + SECONDS_OFF[n], "tokens": 384, "bpb": bpb}

    monkeypatch.setattr(referee.Judge, "run", run)
    monkeypatch.setattr(referee, "require_rules", lambda *_: None)
    return began


@pytest.fixture
def check(at_home, run_main):
    """check(*words) runs `ladder.py check` of records/race/003_new."""
    return lambda *words: run_main(ladder.main, "check", str(at_home / "records" / "race" / "003_new"), *words)


@pytest.mark.slow
def test_an_entry_that_is_faster_to_the_same_loss_holds_and_a_check_resumes(at_home, check, monkeypatch):
    folder, began = write_entry(at_home / "records" / "race" / "003_new", activation="relu2"), planted(monkeypatch)
    first = check("--seeds=3")
    assert first.code == 1 and len(began) == 3 * 3
    assert "then 9 runs on 3 seeds, beside" in first.out
    done = check()
    assert done.code == 0 and len(began) == 5 * 3 and "003_new holds (p = " in done.out and "2.5" in done.out
    assert [name for name, _ in began[:3]] == ["003_new", "002_known", "001_naive"]
    entry = records.read_entry(folder)
    (results,) = entry.results().values()
    assert {run["seed"] for run in results["runs"]} == set(entry.seeds(5))
    counting, new = (
        line for line in records_report.table(race()).splitlines() if line.startswith(("| counting", "| 003_new"))
    )
    assert "holds" in new and "author" not in new and "trigrams, no network" in counting
    records_report.draw(race(), at_home / "records.png")
    assert (at_home / "records.png").stat().st_size > 1e4


def write_results(entry, **changes):
    """Writes what a check of 003_new leaves in an entry's folder; changes: other digests of the entries."""
    names = {each.name: each.digest for each in race().entries if each.name < "003"} | {"003_new": entry.digest}
    lines = [
        {"name": name, "seed": seed, "figures": {"seconds": FASTER[name] + off, "tokens": 384, "bpb": 2.0}}
        for name in names
        for seed, off in zip(entry.seeds(5), SECONDS_OFF, strict=True)
    ]
    conditions = {"begin": records.CHECK, "machine": MACHINE | {"threads": 2}, "entries": names | changes}
    (entry.folder / "machine.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (conditions, *lines)))


def test_the_records_fit_a_terminal():
    text = records_report.on_terminal()
    assert max(map(len, text.splitlines())) <= 80 and "|" not in text
    for each in records.races():
        assert each.title in text
        assert all(f"\n{entry.name}: " in text for entry in each.entries)
        for machine, runs in records.measured(each).items():
            assert f"\n\n{machine}\n\n" in text
            assert all(f"\n{entry.name}: {records.verdict(results)[0]}" in text for entry, results in runs.items())


def test_a_check_says_first_what_it_will_do_and_how_long():
    times = {"001_naive": 1200.0, "002_known": 60.0}
    said = (
        "003_new: the rules, within a minute; then 15 runs on 5 seeds, beside 002_known and 001_naive, about 1.9 hours "
    )
    assert referee.plan(["001_naive", "002_known", "003_new"], 5, times).startswith(said)
    assert "4 runs on 2 seeds, beside 002_known, about 5 minutes by" in referee.plan(["002_known", "003_new"], 2, times)
    assert "beside 002_known. It can be" in referee.plan(["002_known", "003_new"], 2, {})


def test_the_picture_joins_only_entries_that_hold(at_home, drawn):
    folder = write_entry(at_home / "records" / "race" / "003_new", activation="relu2")
    write_results(records.read_entry(folder))
    for text, joined, note in (HEAD, [1, 3], "2.5×"), (f"{HEAD}\nRefused: it saw the seeds.\n", [1], "2.5×\nrefused"):
        (folder / "README.md").write_text(text)
        records_report.draw(race(), at_home / "records.png")
        (axis,) = drawn[-1].axes
        (line,) = [line for line in axis.lines if line.get_label().startswith("a CPU")]
        assert [*line.get_xdata()] == joined and note in [text.get_text() for text in axis.texts]
        intervals = {line.get_xdata()[0]: line.get_ydata() for line in axis.lines if line.get_marker() == "_"}
        assert intervals[2][0] < 2.0 < intervals[2][1] and intervals[3][0] < 2.5 < intervals[3][1]


def test_an_entry_that_was_not_checked_has_the_row_of_the_record_that_it_was(at_home):
    folder = write_entry(at_home / "records" / "race" / "003_new", activation="relu2")
    write_results(records.read_entry(folder))
    rows = {line.split()[1]: line for line in records_report.table(race()).splitlines() if line.startswith("| 00")}
    assert [*rows] == ["002_known", "003_new"]
    assert "2.00×" in rows["002_known"] and "the record in 003_new's check" in rows["002_known"]
    own = records.read_entry(folder.parent / "002_known")
    write_results(own, **{"003_new": "0" * 64})  # not of these files
    assert "the record in 003_new's check" in records_report.table(race())
    (own.folder / "machine.jsonl").unlink()


def test_results_of_other_files_have_no_row_and_are_named(at_home):
    folder = write_entry(at_home / "records" / "race" / "003_new", activation="relu2")
    write_results(entry := records.read_entry(folder))
    assert "| 003_new " in records_report.table(race()) and "machine.jsonl" not in records_report.table(race())
    shutil.copytree(folder, at_home / "records" / "race" / "003_other")
    (at_home / "records" / "race" / "003_other" / "config.py").write_text(
        (folder / "config.py").read_text() + "seed = 7\n"
    )
    text = records_report.table(race())
    assert "| 003_new " in text and "| 003_other " not in text
    assert "- [003_other](003_other/README.md)" in text and text.count("its machine.jsonl is not of these files") == 1
    for changed in ("001_naive", "002_known", "003_new"):
        write_results(entry, **{changed: "0" * 64})
        assert "| 003_new " not in records_report.table(race()) and not records.measured(race())
    write_results(entry)
    (folder / "config.py").write_text((folder / "config.py").read_text() + "seed = 7\n")
    assert "| 003_new " not in records_report.table(race())


@pytest.mark.slow
def test_a_check_that_was_interrupted_before_the_naive_loop_ran_is_not_in_the_table(at_home, check, monkeypatch):
    folder = write_entry(at_home / "records" / "race" / "003_new", activation="relu2")
    planted(monkeypatch)
    monkeypatch.delitem(FASTER, "001_naive")  # its run fails
    with pytest.raises(KeyError):
        check()
    (results,) = records.read_entry(folder).results().values()
    assert len(results["runs"]) == 2
    assert "a CPU" not in records_report.table(race())


def test_the_seeds_follow_from_what_runs(at_home):
    one = records.read_entry(write_entry(at_home / "records" / "race" / "003_new"))
    other = records.read_entry(write_entry(at_home / "records" / "race" / "003_other", n_head=4))
    assert one.seeds(5) == one.seeds(5) and not set(one.seeds(5)) & set(other.seeds(5))
    (one.folder / "README.md").write_text(HEAD + "more words\n")
    assert records.read_entry(one.folder).seeds(5) == one.seeds(5)


@pytest.mark.slow
def test_no_gain_and_a_missed_loss_are_verdicts(at_home, check, monkeypatch):
    folder = write_entry(at_home / "records" / "race" / "003_new")
    monkeypatch.setitem(FASTER, "003_new", 50.0)
    planted(monkeypatch)
    done = check()
    assert done.code == 1 and "003_new no gain on 002_known (p = " in done.out
    next(folder.glob("*.jsonl")).unlink()
    monkeypatch.setitem(FASTER, "003_new", 40.0)
    planted(monkeypatch, **{"003_new": 2.02})
    done = check()
    assert done.code == 1 and "003_new misses the loss (p = " in done.out
    assert "misses the loss" in records_report.table(race())  # it stays, marked
    later = records.read_entry(write_entry(at_home / "records" / "race" / "003_other"))
    assert records.before(later).name == "002_known"  # but the next one need not beat it


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "said"), [(1.8, "holds (p = "), (1.91, "misses the loss (p = ")])
def test_a_counted_loss_is_a_target(loss, said, at_home, check, monkeypatch):
    page = at_home / "records" / "race" / "README.md"
    text = page.read_text()
    page.write_text(text.replace("the naive loop's loss", "trigrams and copies"))
    monkeypatch.setattr(records, "count_tokens", lambda *_: {"seconds": 0.5, "tokens": 384, "loss": 1.3, "bpb": 1.9})
    write_entry(at_home / "records" / "race" / "003_new", activation="relu2")
    planted(monkeypatch, **{"003_new": loss})
    assert said in check().out
    assert "| counting " in records_report.table(race()) and "copies, the loss to reach" in records_report.table(race())
    page.write_text(text)


def test_a_race_without_a_target_is_refused(tmp_path):
    assert "README.md: expected a race's title, and below it Target: " in refusal(records.read_race, tmp_path)
    (tmp_path / "README.md").write_text("# A race\n\nTarget: four-grams.\n")
    assert "Target: four-grams; expected the naive loop's loss, or one of unigrams, bigrams" in refusal(
        records.read_race, tmp_path
    )


def test_a_refused_entry_stays_marked_and_is_not_the_record_to_beat(at_home):
    write_entry(at_home / "records" / "race" / "003_new", HEAD + "\nRefused: its weights came with it.\n")
    later = records.read_entry(write_entry(at_home / "records" / "race" / "003_other"))
    assert records.before(later).name == "002_known"
    assert records.read_entry(at_home / "records" / "race" / "003_new").refused == "its weights came with it."


HUNK = "--- a/{0}\n+++ b/{0}\n@@ -1,2 +1,2 @@\n-nothing\n+something\n like this\n"
LINE = "--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x = 1\n"
RENAMED = "diff --git a/nanoladder/data/batches.py b/nanoladder/run/batches.py\nsimilarity index 100%\n"
RENAMED += "rename from nanoladder/data/batches.py\nrename to nanoladder/run/batches.py\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": "something"}, "README.md: expected a title"),
        ({"patch": HUNK.format("train.py")}, "new.patch does not apply to this commit"),
        ({"patch": LINE.format("lab/research/new.py")}, "it changes lab/research/new.py; expected"),
        ({"patch": LINE.format("nanoladder/data/new.py")}, "it changes nanoladder/data/new.py"),
        ({"patch": LINE.format("nanoladder/prepare/new.py")}, "it changes nanoladder/prepare/new.py"),
        ({"patch": RENAMED}, "it changes nanoladder/data/batches.py; expected"),
        ({"context_length": 8}, "its config has context_length=8; expected the task's 16"),
        ({"nonsense": 1}, ": unknown key 'nonsense'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_invalid_entry_is_refused_in_one_line(changes, said, at_home, check):
    folder = write_entry(at_home / "records" / "race" / "003_new", **changes)
    before = sorted(folder.iterdir())
    done = check()
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_a_folder_without_a_readme_or_with_other_files_is_refused(at_home, check):
    folder = write_entry(at_home / "records" / "race" / "003_new")
    (folder / "weights.bin").touch()
    assert "003_new holds weights.bin; expected" in check().err
    (folder / "README.md").unlink()
    assert "has no README.md" in check().err
    shutil.rmtree(folder)
    assert "no such folder" in check().err


# -- commands of contestants, in processes of their own


@pytest.fixture
def contestant(tmp_path):
    """The folder of a contestant without any code."""
    (tmp_path / "contestants" / "003_new").mkdir(parents=True)
    return tmp_path / "contestants" / "003_new"


DETACHED = """
import os, sys, time
if os.fork():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit()
os.setsid()
if os.fork():
    os._exit(0)
while time.process_time() < 0.5:
    pass
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def test_a_detached_process_is_counted_and_ends_with_its_command(contestant, tmp_path):
    with Session(contestant, "-c", DETACHED, tmp_path / "pid") as session:
        figures = session.finish("its run")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert figures["cpu_seconds"] >= 0.5 and not list(contestant.parent.glob("tmp*"))


def test_an_interrupted_command_ends_as_well(contestant, tmp_path):
    with pytest.raises(KeyboardInterrupt), Session(contestant, "-c", DETACHED, tmp_path / "pid"):
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


LEFT = """
import pathlib, tempfile
for place in {pathlib.Path(), pathlib.Path.home(), pathlib.Path(tempfile.gettempdir())}:
    (place / "left").touch(exist_ok=False)
"""


def test_no_command_finds_what_another_has_left(contestant):
    for _ in range(2):
        with Session(contestant, "-c", LEFT) as session:
            session.finish("its run")
    assert not list(contestant.iterdir())
    with Session(contestant, "-c", "raise SystemExit('error: no such thing')") as session:
        assert refusal(session.finish, "its run") == "003_new: its run fails: no such thing"


def test_an_entry_that_keeps_more_cores_busy_is_refused(at_home, tmp_path, monkeypatch):
    copy, judge = judged(at_home, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.safetensors").touch()
    session = SimpleNamespace(folder=tmp_path, finish=lambda _: {"seconds": 2.0, "cpu_seconds": 6.0})
    monkeypatch.setattr(referee, "train", lambda *_, **keys: nullcontext(session))
    assert refusal(judge.run, copy, 1) == "003_new keeps 3.0 cores busy; expected the naive loop's 2"


def judged(at_home, tmp_path, **changes):
    """A copy of 003_new, and a Judge of two threads."""
    task = referee.load_config([str(at_home / "records" / "race" / "001_naive" / "config.py")])
    entry = records.read_entry(write_entry(at_home / "records" / "race" / "003_new", **changes))
    data = referee.open_dataset(task)
    return referee.copy(entry, tmp_path / entry.name, data), referee.Judge(task, data, 2)


DRAW = 'generator = torch.Generator().manual_seed(crc32(f"{self.config.seed} {name}".encode()))  # one per name'
BUILD = "model = build_model(config, device)"
LOG = "run.log_step(lr, loss, grad_norm)"
LOSS = 'self.row["val_loss"] = val_loss'
EVALUATE = "run.log_evaluation(evaluate(model, dataset.val, config, device))"
EMBED = "x = self.token_embedding(tokens)"
FONT = f"{BUILD}; import matplotlib.font_manager as fonts; open(fonts.findfont('DejaVu Sans'), 'rb').read()"
HONEST = {  # {name: (file, a line of it, its replacement)}
    "a font": ("train.py", BUILD, FONT),
    "a late difference": ("train.py", LOG, "run.log_step(lr, loss + 0.005 * (step > 4), grad_norm)"),
}
ONE_WINDOW = (
    "run.log_evaluation(evaluate(model, dataset.val, type(config)(**{**vars(config), 'eval_windows': 1}), device))"
)
CHEATS = {  # with part of the refusal
    "half the loss": (
        "nanoladder/run/run.py",
        LOSS,
        LOSS.replace("= val", "= 0.5 * val"),
        "003_new ends with val_loss=",
    ),
    "an easy window": ("train.py", EVALUATE, ONE_WINDOW, "003_new ends with val_loss="),
    "the next token": ("model.py", EMBED, EMBED + ".roll(-1, 1)", "003_new: later tokens change a loss by "),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_run_is_evaluated(kind, at_home, tmp_path):
    copy, judge = judged(at_home, tmp_path, patch=patch_of(*HONEST[kind]))
    figures = judge.run(copy, 1)
    assert figures["tokens"] == 384 and 2.0 < figures["loss"] < np.log(64) and figures["cpu_seconds"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHEATS)
def test_a_cheat_is_refused(kind, at_home, tmp_path):
    *change, said = CHEATS[kind]
    copy, judge = judged(at_home, tmp_path, patch=patch_of(*change))
    assert said in refusal(judge.run, copy, 1)


@pytest.mark.slow
def test_weights_that_do_not_depend_on_the_seed_are_refused(at_home, check):
    patch = patch_of("model.py", DRAW, DRAW.replace("{self.config.seed}", "7"))
    folder = write_entry(at_home / "records" / "race" / "003_new", patch=patch)
    done = check("--quick")
    assert done.code == 2 and "error: 003_new: its weights are the same for each seed" in done.err
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.py", "new.patch"]


@pytest.mark.slow
def test_a_quick_check_of_an_honest_entry(at_home, check, monkeypatch):
    monkeypatch.setattr(referee, "FEW", 1)
    folder = write_entry(at_home / "records" / "race" / "003_new", position="rotary")
    done = check("--quick")
    assert done.code == 0 and "003_new keeps the rules" in done.out and "times faster than 002_known" in done.out
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.py"]


def test_tried_lists_what_ended_higher_and_no_earlier(monkeypatch, tmp_path):
    fast, slow, worse = ("fast", 2.0, 30.0), ("slow", 1.8, 60.0), ("worse", 1.9, 70.0)
    lines = [{"begin": "tried"}]
    for name, bpb, seconds in (fast, slow, worse):
        row = {"preset": "laptop", "seed": 0, "keys": {"norm": name}, "prototype": {}}
        lines.append(row | {"figures": {"val_bpb": bpb, "seconds": seconds}})
    path = tmp_path / "machine" / "laptop" / "tried.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(records_report, "RESULTS", tmp_path)
    assert [line for line in records_report.tried().splitlines() if "laptop" in line] == [
        "| laptop | norm=worse | 1.9000 | 1.8000 |"
    ]
