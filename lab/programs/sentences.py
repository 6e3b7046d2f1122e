"""What stages and rungs gain, in sentences, for both pages."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from lab.measure import tables
from lab.measure.stats import Interval
from lab.measure.summary import row_below
from lab.programs.figures import Measured, Scale
from lab.programs.stages import group

BOUNDS = {"": "", "≥ ": "at least ", "≤ ": "at most "}
BESIDE = {  # {verdict on the step from the row before: in words}
    "holds": "{rung} saves tokens: the recipe before it needs {times} times as many{interval}",
    "costs": "{rung} costs tokens: the recipe before it needs {times} times as many{interval}",
    "not significant": "{rung} has no significant effect{doubt}",
    "beyond the curve": "{rung} ends beyond the base's curve, so that its gain is only bounded",
    "kept, not confirmed": "{rung} lowers the loss, which fresh seeds have yet to confirm",
    "left out, not confirmed": "{rung} does not lower the loss, which fresh seeds have yet to confirm",
}
WITHOUT = {  # {verdict on a rung that has no row of its own, but was left out: in words}
    "holds": "the finished recipe without {rung} needs {times} times the tokens{interval}",
    "costs": "the finished recipe without {rung} needs only {times} times the tokens{interval}",
    "not significant": "the finished recipe without {rung} does not differ significantly{doubt}",
    "alone": "the base needs {times} times the tokens of the base with {rung}{interval}",  # of one not left out
}


# -- stages


def gain(rows: Iterable[dict]) -> str:
    """What all stages gain, by rows of --mode=ladder: the default stages, then with those for memory."""
    first, *others = (row for row in rows if "seconds" in row)
    tops = {group(row["name"]): row for row in others if "gains" in row}.values()  # not of too few rounds
    gains = [f"up to {row['name']}, {speed(row['gains'][first['name']])} in {share(row, first)}" for row in tops]
    return f"Against naive, all stages together: {'; '.join(gains)}."


def share(row, other):
    return f"{100 * row['peak'] / other['peak']:.0f} % of the memory"


def measured(figures: Measured, stage: str) -> str:
    """What a stage gains on a machine over the one that it stands on; of the first, its time and memory.

    Of a stage of several processes: the tokens per second of the most. Empty if it was not timed.
    """
    _, mode, _, rows = figures
    if mode != "ladder":
        rates = {row["name"]: row["tokens_per_s"] for row in rows.values() if "seconds" in row}
        (first, rate), (last, most) = (list(rates.items())[n] for n in (0, -1))
        batches = "a batch each" if mode in tables.PER_PROCESS else "one batch for all"
        return f"{last} processes, {batches}: {most / rate:.2f} times the tokens per second of {first}" if rates else ""
    rows = {name: row for name, row in rows.items() if "peak" in row and "seconds" in row}
    if stage not in rows:
        return ""
    row, below = rows[stage], rows.get(row_below(stage, rows))
    if below is None:
        return f"{tables.milliseconds(row['seconds'])} ms a step, {row['peak'] / 1e9:.3f} GB"
    gains = [speed(row["gains"][below["name"]])] if below["name"] in row.get("gains", ()) else []
    return ", ".join([*gains, f"{memory(row['peak'], below['peak'])} memory"])


def speed(interval: Interval) -> str:
    """The Interval of a logarithm of speeds in words: 1.73 times as fast (1.71–1.75); 8 % slower (7–9)."""
    middle, low, high = map(math.exp, interval)
    if not interval.significant:
        return f"no measurable change of speed ({low:.2f}–{high:.2f})"
    if middle > 1:
        return f"{middle:.2f} times as fast ({low:.2f}–{high:.2f})"
    return f"{100 - 100 * middle:.0f} % slower ({100 - 100 * high:.0f}–{100 - 100 * low:.0f})"


def memory(size: float, other: float) -> str:
    """A size compared with another one, in words: 43 % less, 23 % more, or the same."""
    change = 100 * (size / other - 1)
    return "the same" if abs(change) < 1 else f"{abs(change):.0f} % {'more' if change > 0 else 'less'}"


# -- rungs


def worth(rung: str, scales: Iterable[Scale]) -> str:
    """What a rung gains or costs at these scales, a sentence for each corpus and size."""
    sentences = []
    for place, some in itertools.groupby(scales, key=lambda scale: (scale.corpus, scale.parameters)):
        outcomes = [f"after {scale.steps(rung)} steps {outcome(rung, scale.rows[rung])}" for scale in some]
        sentences.append(f"On {place[0]}, {place[1] / 1e6:.1f} million parameters: {'; '.join(outcomes)}.")
    return " ".join(sentences)


def by_loss(rung: str, saved: dict[str, dict[float, dict]]) -> str:
    """What a rung of the finished recipe, or one added to it, saves, {scale: {loss in bits per byte: its gain}}."""
    scales = []
    for scale, gains in saved.items():
        each = ", ".join(f"{tables.factor(gain)} at {loss:.2f}" for loss, gain in gains.items())
        scales.append(f"{each} bits per byte with {scale} parameters")
    return f"the finished recipe's tokens without {rung}, divided by those with it: {'; '.join(scales)}."


def outcome(rung: str, row: dict) -> str:
    """A rung's gain or cost at a scale, by its row."""
    verdict, opening, doubt = (row.get("verdict") or "alone").partition(" (")
    factor: dict[str, Any] = row.get("step") or row.get("without") or row.get("alone") or {"times": 1.0}
    words = (WITHOUT if row["note"] else BESIDE).get(verdict, f"{{rung}} {verdict}")
    return words.format(
        rung=rung,
        times=f"{BOUNDS[factor.get('bound', '')]}{factor['times']:.2f}",
        interval=" ({low:.2f}–{high:.2f})".format(**factor) if "low" in factor else "",
        doubt=(opening + doubt).replace("± ", "±\u00a0"),
    )
