"""The cards of the second ladder, as HTML: the figures of a rung on each machine, at every scale."""

from lab.measure import stats
from lab.measure.stats import LEVEL
from lab.programs import sentences
from lab.programs.figures import by_loss, describe_machine
from lab.programs.html.elements import bars_table, card, join, table, tag
from lab.research import records, records_report

FIGURES = {"tokens": "tokens ×", "step": "over the last kept", "alone": "alone", "without": "without"}
FACTORS = {"ms": "time of a step ×", "gain": "gain"}
INTERVALS = f"In brackets: simultaneous {LEVEL:.0%} intervals over all rungs."
HOW_TO_READ = (
    "Tokens without, divided by tokens with, to the same loss. tokens ×: the recipe up to this rung, compared with "
    "the base; over the last kept: with the rungs kept before this one was measured; alone: this rung on the base; "
    "without: the finished recipe, compared with itself without the rung (≥, ≤: bounds). Time of a step: relative to "
    f"the base's; gain: tokens × divided by it. {INTERVALS}"
)


def section(rung):
    """Returns the section on a rung: a card for each machine that measured it, or a card without figures."""
    draw = rung_card if rung.below else base_card
    saved = by_loss().get(rung.name)
    cards = [by_loss_card(saved)] if saved else []
    cards += [draw(machine, rung.name, scales) for machine, scales in rung.figures.items()]
    measured = [(race, *each) for race in records.races() for each in records.measured(race).items()]
    cards += [] if rung.below else [race_card(*each) for each in measured]
    unmeasured = tag("article", tag("p", f"No run has measured {rung.name} yet."), class_="card")
    return tag("section", *(cards or [unmeasured]), class_="cards", aria_label="Measured")


def by_loss_card(saved):
    """A card with what a rung saves, {scale: {loss in bits per byte: its gain}}."""
    rows = [
        (f"{scale} parameters, {loss:.2f} bits per byte", times(gain))
        for scale, gains in saved.items()
        for loss, gain in gains.items()
    ]
    return card(
        "by loss",
        "",
        tag("h4", "Tokens of the finished recipe without it, divided by those with it"),
        table("parts worth", "Worth by loss", rows),
        tag("p", f"At the finished recipe's loss. {INTERVALS}", class_="fine"),
    )


def rung_card(machine, rung, scales):
    """A card with sentences on what a rung gained or cost at these scales, and a table with a column for each."""
    rows = [scale.rows[rung] for scale in scales]
    lines = [(label, *(times(row.get(key)) for row in rows)) for key, label in FIGURES.items()]
    lines += [(label, *(f"{row[key]:.2f}" if key in row else "" for row in rows)) for key, label in FACTORS.items()]
    measured = [line for line in lines if any(line[1:])]
    bases = {f" The {base_in_words(scale)} has {', '.join(scale.on)}." for scale in scales if scale.on}
    return card(
        describe_machine(machine),
        "",
        tag("h4", "Tokens to the same loss"),
        tag("p", sentences.worth(rung, scales)),
        table("parts worth", "Worth at each scale", measured, ["", *headings(rung, scales)]),
        tag("p", HOW_TO_READ, *sorted(bases), class_="fine"),
    )


def base_card(machine, base, scales):
    """A card of bars: how many tokens the recipe up to each rung saves."""
    content = []
    for scale in scales:
        saved = {name: row["tokens"]["times"] for name, row in scale.rows.items() if "tokens" in row}
        bars = [(f"{value:.2f}×", name, {"gemm": value}, 1.0) for name, value in saved.items()]
        title = f"{scale.corpus}, {base_in_words(scale)}" if scale.on else scale.corpus
        size = tag("b", f"{scale.parameters / 1e6:.1f} M parameters")
        content += [tag("h4", title, size), bars_table(title, bars, None, max(saved.values(), default=1.0))]
    fine = "Bars: the base's tokens divided by the recipe's up to each rung, to the same loss. The mark: the base."
    return card(describe_machine(machine), "tokens to the same loss", *content, tag("p", fine, class_="fine"))


def race_card(race, machine, runs):
    """A card of bars: the speedup of each entry of a race over the naive loop, to the race's loss."""
    speedups = {entry.name: stats.mean_ratio(records.log_speedups(results)) for entry, results in runs.items()}
    bars = [(f"{value:.2f}×", name, {"gemm": value}, 1.0) for name, value in speedups.items()]
    rows = {entry.name: records_report.figures(entry, results) for entry, results in runs.items()}
    verdicts = [f"{name}: {row['bits/byte (naive)']} bits per byte, {row['verdict']}. " for name, row in rows.items()]
    counted = [each["counted"]["bpb"] for each in records_report.beside(runs)]
    verdicts += [f"No network, counted {race.counted}: {bpb:.4f}. " for bpb in counted]
    fine = "Bars: speedup over the naive loop (the mark, in brackets) of a whole command, to the loss. "
    content = bars_table("records", bars, None, max(speedups.values())), tag("p", fine, *verdicts, class_="fine")
    return card(machine, f"a race: {race.title[0].lower()}{race.title[1:]}", *content)


def headings(rung, scales):
    """The heading of each scale's column: its corpus, size, steps, and how many rungs its base has."""
    details = [
        f"{scale.parameters / 1e6:.1f} M, {scale.steps(rung)} steps{f', {base_in_words(scale)}' if scale.on else ''}"
        for scale in scales
    ]
    return [join(scale.corpus, " ", tag("small", text)) for scale, text in zip(scales, details, strict=True)]


def base_in_words(scale):
    return f"base with {len(scale.on)} rung{'s' if len(scale.on) > 1 else ''}"


def times(factor):
    """A factor of tokens with its interval; empty if it was not measured."""
    if factor is None:
        return ""
    interval = tag("small", f"({factor['low']:.2f}–{factor['high']:.2f})") if "low" in factor else ""
    return join(f"{factor.get('bound', '')}{factor['times']:.2f} ", interval)
