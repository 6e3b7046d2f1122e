"""tune.json, the record of --mode=tune, and the files made of it: a table and the tuned config."""

import json
import math
import re
import statistics
import textwrap
from pathlib import Path

from lab import tables
from lab.plan import in_words
from lab.results import commit, machine_name, presets, resume, write
from lab.rounds import SIDES, bounds, plan_looks
from nanoladder.config import parse_arguments

FORMAT_VERSION = 1
LONGEST = 200  # characters of a config's name
SEARCH, CONFIRMATION = plan_looks(12), plan_looks(24)  # looks at the rounds of a race
COLUMNS = {  # of the table of races
    "ms/step": lambda row: milliseconds(row["race"], "this"),
    "speed": lambda row: speed(row["race"]),
    "outcome": lambda row: row["race"]["outcome"] or "no time left",
    "best so far": lambda row: milliseconds(row["race"], "other"),
    "rounds": lambda row: str(len(row["race"]["rounds"])),
}


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
    return {"changes": changes, "against": against, "outcome": None, "note": None, "rounds": []}


def changes_of_time(race):
    """The change of time in each round, as a share."""
    return [seconds["this"] / seconds["other"] - 1 for seconds in race["rounds"]]


def cost(race):
    """The change of time that a race has shown: the median of its rounds, or that of the first steps."""
    if race["outcome"] == "failed":
        return math.inf
    return statistics.median(changes_of_time(race)) if race["rounds"] else race.get("first", 0.0)


def verdict(best, confirmation):
    """The changes to write, and the outcome in words."""
    if confirmation is None:
        return {"changes": {}, "text": "no change of the finished loop is seen to be faster"}
    if confirmation["outcome"] == "kept":
        finished, ours = (milliseconds(confirmation, side) for side in SIDES)
        text = f"{speed(confirmation, CONFIRMATION)} as fast as the finished loop, {ours} ms a step and not {finished}"
        return {"changes": best, "text": text}
    if confirmation["outcome"]:
        text = f"the tuned loop is not seen to be faster than the finished one ({speed(confirmation, CONFIRMATION)})"
    else:
        text = "no time was left to compare the tuned loop with the finished one (more --minutes continue)"
    return {"changes": {}, "text": text}


# -- in words


def name(race):
    """The change in words, without the compile=True that comes with a scope or a mode of the compiler."""
    change = race["change"]
    return in_words({field: change[field] for field in change if field != "compile" or len(change) == 1})


def speed(race, looks=SEARCH):
    """The speed beside the other config and its interval over the rounds, such as 1.10× (1.07–1.18).

    Without rounds, the speed of the first steps; an empty string if they were not timed either.
    """
    if not race["rounds"]:
        return f"{1 / (1 + race['first']):.2f}×" if "first" in race else ""
    changes = changes_of_time(race)
    low, high = bounds(changes, looks.get(len(changes), 1))
    return f"{1 / (1 + statistics.median(changes)):.2f}× ({1 / (1 + high):.2f}–{1 / (1 + low):.2f})"


def outcome(race):
    """The outcome of a race in words."""
    if race["outcome"] == "failed":
        return race["note"]
    return f"{speed(race)} as fast, {race['outcome']}"


def milliseconds(race, side):
    """The median of the rounds, empty without them."""
    seconds = [seconds[side] for seconds in race["rounds"]]
    return tables.milliseconds(statistics.median(seconds)) if seconds else ""


# -- the files


def report(results, verdict, folder, tuned_dir):
    """Writes the table, and the config in tuned_dir unless it would change nothing; prints the outcome.

    Raises BadInput if a file cannot be written.
    """
    path = config_path(results["machine"], results["config"], tuned_dir)
    races = [race for race in results["races"] if race["outcome"] or race["rounds"]]
    rows = [{"name": f"{n}. {name(race)}", "note": race["note"], "race": race} for n, race in enumerate(races, 1)]
    sentence = f"{verdict['text'].capitalize()}: {in_words(verdict['changes']) or 'the config as it is'}."
    keys, torch = results["keys"], results["machine"]["torch"]
    table = [
        f"## tune: `{' '.join(results['config'])}`",
        f"{tables.device(results)}; torch {torch}; a step is {keys['batch_size']} × {keys['context_length']} tokens; "
        f"{len(rows)} changes tried in {results['spent'] / 60:.1f} minutes.",
        f"**{sentence}**",
        tables.markdown(COLUMNS, rows),
        "Each change raced against the best config so far, which it replaced if it was kept. A speed is the median of "
        "the rounds, and the interval of the sign test or, of less than 8 rounds, their range. No rounds: the first "
        "steps were clear.",
    ]
    write(folder, {"tune.md": "\n\n".join(table)})
    print(tables.on_terminal(sentence, COLUMNS, rows))
    print(f"\nwritten: {folder}/tune.md with all figures, and tune.json")
    if verdict["changes"]:
        write(path.parent, {path.name: tuned_config(path, results, verdict, len(rows))})
        print(f"use: python train.py {' '.join(results['config'])} {path}")
    else:
        path.unlink(missing_ok=True)  # of an earlier search


def tuned_config(path, results, verdict, n_tried):
    """The text of the tuned config: a docstring with the figures, and assignments."""
    words, torch = " ".join(results["config"]), results["machine"]["torch"]
    tries = f"{n_tried} changes tried in {results['spent'] / 60:.1f} minutes, torch {torch}."
    lines = [
        '"""' + textwrap.fill(f"Tuned for {tables.device(results)}: {verdict['text']}.", 115),
        "",
        tries,
        f"Written by: python profile.py {words} --mode=tune",
        f"To be used: python train.py {words} {path.as_posix()}",
        '"""',
        "",
    ]
    for field, value in verdict["changes"].items():
        kept = [race for race in results["races"] if race["outcome"] == "kept" and field in race["change"]]
        text = json.dumps(value) if isinstance(value, str) else repr(value)
        lines.append(f"{field} = {text}  # {speed(kept[-1])} the speed of the best before")
    return "\n".join(lines)


def config_path(machine, words, tuned_dir):
    """<machine>/<config>.py in tuned_dir; further words are in its name, as in reference-dtype-float32.py."""
    given = parse_arguments(words)[1]
    given.pop("device", None)  # the machine's name says it
    text = "-".join([presets(words), *(f"{key}-{given[key]}" for key in sorted(given))])
    name = re.sub(r"[^\w.-]+", "-", text)[:LONGEST]
    return Path(tuned_dir, machine_name(machine), f"{name}.py")
