"""The cards of the second ladder, as HTML: the figures of a rung on each machine, at every scale."""

import itertools

from lab.measure import stats
from lab.measure.stats import LEVEL
from lab.programs.figures import describe_machine
from lab.programs.html.elements import bars_table, card, join, table, tag
from lab.research import records

FIGURES = {"tokens": "tokens ×", "step": "over the last kept", "alone": "alone", "without": "without"}
FACTORS = {"ms": "time of a step ×", "gain": "gain"}
HOW_TO_READ = (
    "How many times fewer tokens reach the same loss. tokens ×: the recipe up to this rung, compared with the base; "
    "over the last kept: with the rungs kept before this one was measured; alone: this rung on the base; without: the "
    "finished recipe, compared with itself without the rung (≥, ≤: bounds). Time of a step: relative to the base's; "
    f"gain: tokens × divided by it. In brackets: simultaneous {LEVEL:.0%} intervals over all rungs."
)
BOUNDS = {"": "", "≥ ": "at least ", "≤ ": "at most "}
BESIDE = {  # {verdict on the step from the row before: as text}
    "holds": "{rung} saves tokens: the recipe before it needs {times} times as many",
    "costs": "{rung} costs tokens: the recipe before it needs {times} times as many",
    "not significant": "{rung} has no significant effect{doubt}",
    "beyond the curve": "{rung} ends beyond the base's curve, so that its gain is only bounded",
    "kept, not confirmed": "{rung} lowers the loss, which fresh seeds have yet to confirm",
    "left out, not confirmed": "{rung} does not lower the loss, which fresh seeds have yet to confirm",
}
WITHOUT = {  # {verdict on a rung that has no row of its own, but was left out: as text}
    "holds": "the finished recipe without {rung} needs {times} times the tokens",
    "costs": "the finished recipe without {rung} needs only {times} times the tokens",
    "not significant": "the finished recipe without {rung} does not differ significantly{doubt}",
}


def section(rung):
    """Returns the section on a rung: a card for each machine that measured it, or a card without figures."""
    draw = rung_card if rung.below else base_card
    cards = [draw(machine, rung.name, scales) for machine, scales in rung.figures.items()]
    cards += [] if rung.below else [race_card(*each) for each in records.measured().items()]
    unmeasured = tag("article", tag("p", f"No run has measured {rung.name} yet."), class_="card")
    return tag("section", *(cards or [unmeasured]), class_="cards", aria_label="Measured")


def rung_card(machine, rung, scales):
    """A card with a sentence on what a rung gained or cost at these scales, and a table with a column for each."""
    rows = [scale.rows[rung] for scale in scales]
    lines = [(label, *(times(row.get(key)) for row in rows)) for key, label in FIGURES.items()]
    lines += [(label, *(f"{row[key]:.2f}" if key in row else "" for row in rows)) for key, label in FACTORS.items()]
    bases = [f" The base of {scale.name} has {', '.join(scale.on)}." for scale in scales if scale.on]
    return card(
        describe_machine(machine),
        "",
        tag("h4", "Tokens to the same loss"),
        tag("p", sentence(rung, scales)),
        table("parts worth", "Worth at each scale", filter(lambda line: any(line[1:]), lines), headings(scales)),
        tag("p", HOW_TO_READ, *bases, class_="fine"),
    )


def base_card(machine, base, scales):
    """A card of bars: how many tokens the recipe up to each rung saves."""
    content = []
    for scale in scales:
        saved = {name: row["tokens"]["times"] for name, row in scale.rows.items() if "tokens" in row}
        bars = [(f"{value:.2f}×", name, {"gemm": value}, 1.0) for name, value in saved.items()]
        size = tag("b", f"{scale.parameters / 1e6:.1f} M parameters")
        content += [tag("h4", scale.name, size), bars_table(scale.name, bars, None, max(saved.values(), default=1.0))]
    fine = "Bars: how many times fewer tokens than the base reach its loss, up to each rung. The mark: the base."
    return card(describe_machine(machine), "tokens to the same loss", *content, tag("p", fine, class_="fine"))


def race_card(machine, runs):
    """A card of bars: the speedup of each entry of the race over the naive loop, to the same loss."""
    speedups = {entry.name: stats.mean_ratio(records.log_speedups(results)) for entry, results in runs.items()}
    bars = [(f"{value:.2f}×", name, {"gemm": value}, 1.0) for name, value in speedups.items()]
    verdicts = [f"{entry.name}: {records.figures(entry, results)['verdict']}. " for entry, results in runs.items()]
    fine = "Bars: speedup of a whole command over the naive loop, to the same loss. The mark: the naive loop. "
    content = bars_table("records", bars, None, max(speedups.values())), tag("p", fine, *verdicts, class_="fine")
    return card(machine, "the race that anyone can enter", *content)


def headings(scales):
    return ["", *(join(scale.name, " ", tag("small", f"{scale.parameters / 1e6:.1f} M")) for scale in scales)]


def times(factor):
    """A factor of tokens with its interval; empty if it was not measured."""
    if factor is None:
        return ""
    interval = tag("small", f"({factor['low']:.2f}–{factor['high']:.2f})")
    return join(f"{factor.get('bound', '')}{factor['times']:.2f} ", interval)


def sentence(rung, scales):
    """Describes a rung's gain or cost at these scales; models of one size and dataset come together."""
    outcomes = []
    for scale, some in itertools.groupby(scales, key=in_words):
        outcomes.append(f"{scale} {', and '.join(outcome(rung, each.rows[rung]) for each in some)}")
    return f"At {'; at '.join(outcomes)}."


def in_words(scale):
    """A scale's size and, if it is not the config's own, its dataset."""
    return f"{scale.parameters / 1e6:.1f} million parameters{f' on {scale.corpus}' if scale.corpus else ''}"


def outcome(rung, row):
    """Describes a rung's gain or cost at a scale, by its row."""
    verdict, opening, doubt = row["verdict"].partition(" (")
    factor = row.get("step") or row.get("without") or {"times": 1.0}
    words = (WITHOUT if row["note"] else BESIDE).get(verdict, f"{{rung}} {verdict}")
    times = f"{BOUNDS[factor.get('bound', '')]}{factor['times']:.2f}"  # pyright: ignore
    return words.format(rung=rung, times=times, doubt=(opening + doubt).replace("± ", "±\u00a0"))
