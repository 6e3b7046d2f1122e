"""tune.json, the record of --mode=tune, and the files made of it: a table and the tuned config."""

import hashlib
import json
import math
import re
import statistics
import textwrap
from pathlib import Path

from lab import tables
from lab.plan import in_words
from lab.results import commit, machine_name, presets, resume
from lab.rounds import SIDES, bounds, plan_looks
from nanoladder import files
from nanoladder.config import parse_arguments
from nanoladder.errors import BadInput

FORMAT_VERSION = 1
LONGEST = 80  # characters of a config's name
SEARCH, CONFIRMATION = plan_looks(12), plan_looks(24)  # looks at the rounds of a race


# -- the record


def open_results(folder, conditions):
    """The results in a folder's tune.json, or new ones. Raises BadInput if they are of other conditions."""
    conditions = {"format_version": FORMAT_VERSION, **conditions}
    results = resume(folder / "tune.json", conditions, {"spent": float, "races": list, "confirmations": list})
    return results or {**conditions, "commit": commit(), "spent": 0.0, "races": [], "confirmations": []}


def find(races, changes, against):
    """The race of these two configs, each as changes of the finished one, if it has begun; else a new one."""
    for race in races:
        if (race["changes"], race["against"]) == (changes, against):
            return race
    return {"changes": changes, "against": against, "outcome": None, "note": None, "losses": None, "rounds": []}


def changes_of_time(race):
    """The change of time in each round, as a share."""
    return [found["this"] / found["other"] - 1 for found in race["rounds"]]


def cost(race):
    """The change of time that a race has shown: the median of its rounds, or that of the first steps."""
    if race["outcome"] == "failed":
        return math.inf
    return statistics.median(changes_of_time(race)) if race["rounds"] else race.get("first", 0.0)


def verdict(best, confirmation):
    """The changes to write, the confirmation if there was one, and the outcome in words."""
    if confirmation is None:
        return {"changes": {}, "race": None, "text": "no change of the finished loop is seen to be faster"}
    if confirmation["outcome"] == "kept":
        text = f"{speed(confirmation, CONFIRMATION)} as fast as the finished loop"
        return {"changes": best, "race": confirmation, "text": text}
    if confirmation["outcome"]:
        text = f"the tuned loop is not seen to be faster than the finished one ({speed(confirmation, CONFIRMATION)})"
    else:
        text = "no time was left to compare the tuned loop with the finished one (more --minutes continue)"
    return {"changes": {}, "race": confirmation, "text": text}


# -- in words


def name(race):
    """The change in words, without the compile=True that comes with a scope or a mode of the compiler."""
    change = race["change"]
    return in_words({field: change[field] for field in change if field != "compile" or len(change) == 1})


def names(races):
    """The names of races, those of a change that raced before with a mark."""
    found = [name(race) for race in races]
    return [text + ", again" * found[:at].count(text) for at, text in enumerate(found)]


def speed(race, looks=SEARCH):
    """The speed beside the other config and its interval over the rounds, such as 1.10× (1.07–1.18).

    Without rounds, the speed of the first steps; an empty string if they were not timed either.
    """
    if not race["rounds"]:
        return f"{1 / (1 + race['first']):.2f}×" if "first" in race else ""
    changes = changes_of_time(race)
    low, high = bounds(changes, looks.get(len(changes), 1))
    interval = f" ({1 / (1 + high):.2f}–{1 / (1 + low):.2f})" * (len(changes) > 1)
    return f"{1 / (1 + statistics.median(changes)):.2f}×{interval}"


def outcome(race):
    """The outcome of a race in words."""
    if race["outcome"] == "failed":
        return race["note"]
    if "first" not in race:
        return "not raced: no time left"
    ends = {"kept": "kept", "slower": "dropped", "no gain": "dropped, no gain seen", None: "no time left"}
    return f"{speed(race)} as fast, {ends[race['outcome']]}"


# -- the files


def report(results, verdict, untried, folder, tuned_dir):
    """Writes the table, and the config in tuned_dir unless it would change nothing; prints the outcome.

    Raises BadInput if a file cannot be written.
    """
    path = config_path(results["machine"], results["config"], tuned_dir)
    try:
        files.write(folder / "tune.md", table(results, verdict, untried) + "\n")
        if verdict["changes"]:
            write_config(path, results, verdict)
        else:
            path.unlink(missing_ok=True)  # of an earlier search
    except OSError as error:
        raise BadInput(
            f"{error.filename or folder} cannot be written ({error}); the same command tries again"
        ) from None
    print(tables.on_terminal(outcome_of(verdict), columns(results), rows_of(results)))
    print(f"\nwritten: {folder}/tune.md with all figures, and tune.json")
    if verdict["changes"]:
        print(f"use: python train.py {' '.join(results['config'])} {path}")


def table(results, verdict, untried):
    """The races in Markdown: the conditions, the best config, and the changes in the order of their races."""
    keys, rows = results["keys"], rows_of(results)
    text = [
        f"## tune: `{' '.join(results['config'])}`",
        f"{tables.device(results)}; torch {results['machine']['torch']}; a step is {keys['batch_size']} × "
        f"{keys['context_length']} tokens; {len(rows)} changes tried in {results['spent'] / 60:.1f} minutes.",
        f"**{outcome_of(verdict)}**",
    ]
    if confirmed := comparison(verdict["race"]):
        text.append(sentence(confirmed))
    text.append(tables.markdown(columns(results), rows))
    text.append(
        "Each change raced against the best config so far, which it replaced if it was kept. A speed is the median of "
        "the rounds, and the interval of the sign test or, of less than 8 rounds, their range. No rounds: the first "
        "steps were clear. Losses: of the first five steps, against the finished loop's."
    )
    if untried:
        text.append(f"Not tried for lack of time: {'; '.join(dict.fromkeys(untried))}.")
    return "\n\n".join(text)


def outcome_of(verdict):
    """The verdict and the changes in words."""
    return f"{sentence(verdict['text'])}: {in_words(verdict['changes']) or 'the config as it is'}."


def rows_of(results):
    """A row for each race that was tried, for tables.markdown."""
    races = [race for race in results["races"] if tried(race)]
    return [{"name": text, "note": race["note"], "race": race} for text, race in zip(names(races), races, strict=True)]


def columns(results):
    """{heading: row -> text} of the table of races, the most important first."""
    return {
        "ms/step": lambda row: milliseconds(row["race"], "this"),
        "speed": lambda row: speed(row["race"]),
        "outcome": lambda row: row["race"]["outcome"] or "no time left",
        "best so far": lambda row: milliseconds(row["race"], "other"),
        "rounds": lambda row: str(len(row["race"]["rounds"])),
        "losses apart": lambda row: apart(row["race"], results["losses"]),
        "predicted GB": lambda row: f"{row['race']['predicted'] / 1e9:.3f}" if "predicted" in row["race"] else "",
        "minute": lambda row: f"{row['race']['minute']:.1f}",
    }


def tried(race):
    return bool(race["outcome"] or race["rounds"])


def comparison(race):
    """The sentence on a race of the tuned loop against the finished one; empty if there was none."""
    if not (race and race["rounds"]):
        return ""
    finished, found = (milliseconds(race, side) for side in SIDES)
    return f"tuned {found} ms a step, finished {finished} ms, in {len(race['rounds'])} rounds after the search."


def milliseconds(race, side):
    """The median of the rounds, empty without them."""
    seconds = [found[side] for found in race["rounds"]]
    return tables.milliseconds(statistics.median(seconds)) if seconds else ""


def apart(race, finished):
    """The largest difference of a loss."""
    gap = max(abs(a - b) for a, b in zip(race["losses"], finished, strict=True)) if race["losses"] else None
    return "" if gap is None else f"{gap:.0e}" if gap else "bit-equal"


def sentence(text):
    return text[:1].upper() + text[1:]


def write_config(path, results, verdict):
    """Writes the tuned config: a docstring with the figures, and assignments."""
    on, words = results["machine"], " ".join(results["config"])
    versions = f"torch {on['torch']}" + f", CUDA {on['cuda']}" * bool(on["cuda"]) + f", Python {on['python']}"
    tries = f"Changes tried: {sum(map(tried, results['races']))}, in {results['spent'] / 60:.1f} minutes; {versions}."
    lines = [
        '"""' + textwrap.fill(f"Tuned for {tables.device(results)}: {verdict['text']}.", 115),
        "",
        textwrap.fill(f"{sentence(comparison(verdict['race']))} {tries}".strip(), 115),
        f"Written by: python profile.py {words} --mode=tune",
        f"To be used: python train.py {words} {path.as_posix()}",
        '"""',
        "",
        *(assignment(field, value, results["races"]) for field, value in verdict["changes"].items()),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, "\n".join(lines) + "\n")


def config_path(machine, words, tuned_dir):
    """<machine>/<config>.py in tuned_dir; further words are in its name, as in reference-dtype-float32.py.

    A digest tells apart names that would be too long or that have characters for which "-" stands here.
    """
    given = parse_arguments(words)[1]
    given.pop("device", None)  # the machine's name says it
    text = "-".join([presets(words), *(f"{key}-{given[key]}" for key in sorted(given))])
    name = re.sub(r"[^\w.-]+", "-", text)
    if name != text or len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return Path(tuned_dir, machine_name(machine), f"{name}.py")


def assignment(field, value, races):
    """A line of the config, with the speed that the change had when it was kept."""
    kept = [race for race in races if race["outcome"] == "kept" and field in race["change"]]
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    return f"{field} = {text}" + (f"  # {speed(kept[-1])} the speed of the best before" if kept else "")
