"""The page for a browser has every program and the figures in results/; no text becomes markup."""

import dataclasses
import html
import json
import re
import statistics
from html.parser import HTMLParser

import pytest
from conftest import ROOT

import ladder
from lab.measure import runs, summary, tables
from lab.measure.results import STEPS, read_results
from lab.measure.tables import KINDS
from lab.programs import diffs, figures
from lab.programs.figures import SCALING, Measured, Scale
from lab.programs.html import build, rung_cards, stage_cards
from lab.programs.html.elements import Markup, tag
from lab.programs.sentences import by_loss, gain, outcome, worth
from lab.programs.stages import BOTH, describe, group
from nanoladder.config import stage_names
from nanoladder.config.stages import RECIPE_DIR
from nanoladder.errors import BadInput

STAGES = stage_names()
FILES = sorted((ROOT / "results").glob("*/*/runs.jsonl"))
RESULTS = {path: read_results(path) for path in FILES}
MEASURED = {
    f"{path.parent.parent.name}/{path.parent.name}": (path, results)
    for path, results in RESULTS.items()
    if "ladder" in results["modes"]
}


@pytest.mark.slow
def test_the_page_is_small_and_has_every_stage_with_every_line_of_its_program(built):
    text = built.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    assert "005_one_block: 1.7262 (1.7985) bits per byte" in text and "No network, counted trigrams: 1.6902" in text
    assert re.findall(r"<article id=(\w+) class=stage ", text) == BOTH
    lines = re.search(r"<template id=lines>(.*?)</template>", text, re.DOTALL)[1].split("\n")
    ladder = json.loads(re.search(r"<script type=application/json id=ladder>(.*?)</script>", text)[1])
    assert [stage["name"] for stage in ladder["stages"]] == BOTH
    for stage in ladder["stages"]:
        program = diffs.script(stage["name"]).splitlines()
        assert [html.unescape(re.sub(r"<[^>]*>", "", lines[n])) for n in stage["lines"]] == program


def test_the_rail_groups_stages_that_follow_each_other():
    groups = [group(stage) for stage in BOTH]
    assert [name for n, name in enumerate(groups) if name != groups[n - 1] or n == 0] == list(build.GROUPS)
    assert group("chunked_loss") == "speed" and group("checkpointing") == "memory"
    assert build.rail().count("<li class=group>") == len(build.GROUPS)


def test_texts_are_escaped():
    value = {"</script><script>alert(1)": ["<!--", "é"]}
    assert "<" not in build.embedded(value) and json.loads(build.embedded(value)) == value
    texts = {"introduction": "a < b, `x & y`", "parts": {"Why": "c > d"}, "sources": [("<b>", "https://a.b/?c&d")]}
    shown = build.text(dataclasses.replace(describe("amp"), **texts))
    assert "<p>a &lt; b, <code>x &amp; y</code></p>" in shown and "<dd><p>c &gt; d</p></dd>" in shown
    assert '<a href="https://a.b/?c&amp;d" rel="noreferrer">&lt;b&gt;</a>' in shown
    assert tag("p", "<b>", Markup("<i>"), title='"<', class_="x") == '<p title="&quot;&lt;" class="x">&lt;b&gt;<i></p>'


# -- figures


def card(key, stage):
    return stage_cards.stage_card(figures.measured("ladder")[key], stage)


def words(markup):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_every_machine_is_listed_and_that_of_the_readme_comes_first():
    assert MEASURED.keys() == figures.measured("ladder").keys()
    assert re.findall(r'data-set="(.+?)"', stage_cards.section(describe("amp"))) == list(figures.measured("ladder"))
    assert next(iter(figures.measured("ladder"))) == figures.SHOWN["two cores"]
    assert re.findall(r'value="(.+?)"', stage_cards.options()) == list(figures.measured("ladder"))


@pytest.mark.parametrize("key", MEASURED)
def test_bars_and_parts_are_those_of_the_runs(key):
    _, results = MEASURED[key]
    rows = {name: row for name, row in results["modes"]["ladder"]["rows"].items() if "time" in row}
    median = {name: statistics.median(process["seconds"] for process in row["time"]) for name, row in rows.items()}
    for stage in (stage for stage in STAGES if stage in rows):
        row, raw = figures.measured("ladder")[key].rows[stage], rows[stage]["profile"][0]
        kinds, parts = stage_cards.TIME.parts(row), stage_cards.MEMORY.parts(row)
        # A GPU's kernels take as long in the profiled step as in any other; the profiler slows down the host
        usual = 1.0 if results["machine"]["gpu"] else median[stage] / raw["profiled_seconds"]
        assert sum(kinds.values()) == pytest.approx(median[stage], rel=0.05 if results["machine"]["gpu"] else 1e-6)
        assert kinds["gemm"] == pytest.approx(raw["seconds_by_kind"]["gemm"] * usual)
        assert parts["activations"] == raw["memory"]["activations"]
        assert sum(parts.values()) == raw["memory"]["peak"]
        time, memory = card(key, stage).split("<section>")[1:]
        for chart, total, scale in (
            (time, median[stage], max(median.values())),
            (memory, raw["memory"]["peak"], max(row["profile"][0]["memory"]["peak"] for row in rows.values())),
        ):
            drawn = re.search(r'<tr class="now">.*?<svg.*?>(.*?)</svg>', chart)[1]
            widths = [float(width) for width in re.findall(r"1h([\d.]+)", drawn)]
            assert sum(widths) == pytest.approx(100 * total / scale, abs=0.5)
        said = words(card(key, stage))
        assert f"Time of a step {tables.milliseconds(median[stage])} ms" in said
        assert f"Memory of a step {raw['memory']['peak'] / 1e9:.3f} GB" in said
        shown = tables.milliseconds(kinds["attention"], median[stage])
        assert re.search(rf"attention [\d.]+ {shown} ", words(time))


@pytest.mark.parametrize("stage", SCALING)
def test_stages_of_several_processes_have_the_figures_of_their_mode(stage):
    mode = SCALING[stage]
    holding = [results for results in RESULTS.values() if mode in results["modes"]]
    cards = [card for card in stage_cards.section(describe(stage)).split("</article>") if "Tokens per second" in card]
    assert len(cards) == len(holding) > 0
    for card, results in zip(cards, holding, strict=True):
        for n, row in results["modes"][mode]["rows"].items():
            if row["time"]:
                median = statistics.median(process["seconds"] for process in row["time"])
                assert f"{n} process" in words(card) and f"{row['time'][0]['tokens'] / median:,.0f}" in words(card)
        assert " ".join(results["config"]) in words(card)


def test_the_first_stage_has_a_bar_of_each_and_says_what_all_gain():
    key, _, _, rows = figures.shown()
    assert gain(rows.values()) in words(build.opening(describe("naive")))
    timed = {name for name, row in rows.items() if "seconds" in row}
    assert set(re.findall(r'href="#(\w+)"', card(key, "naive"))) == timed - {"naive"}


def planted(**row):
    """Figures of amp beside naive's."""
    naive = {"name": "naive", "note": None, "seconds": 2.0, "rounds": [2.0] * 3, "turns": 0}
    naive |= {"shares": dict.fromkeys(KINDS, 0.1)}
    rows = {"naive": naive, "amp": naive | {"name": "amp"} | row}
    for each in rows.values():
        each["rounds"] = {n: [one] for n, one in enumerate(each["rounds"])}
    summary.add_gains(list(rows.values()), "ladder")
    return stage_cards.stage_card(Measured("a/b", "ladder", figures.shown().results, rows), "amp")


@pytest.mark.parametrize(
    "row, said",
    [
        (
            {"rounds": [1.0, 1.0, 1.0], "seconds": 1.0},
            "good><strong>2.00×</strong> the speed of naive <small>(2.00–2.00)</small>",
        ),
        ({"rounds": [4.0, 4.0, 4.0], "seconds": 4.0}, "bad><strong>0.50×</strong>"),
        ({"rounds": [1.9, 2.0, 2.1]}, "no measurable change (0.89–1.13) against naive"),
        ({"rounds": [2.0, 2.0]}, "too few rounds to compare with naive"),
        ({"limit": 0.2, "limit_bounds": {"compute": 3, "memory": 1}}, "class=limit"),
        ({"limit": 0.2, "limit_bounds": {"compute": 3, "memory": 1}}, "<th>bound by</th><td>compute 75%</td>"),
        ({"limit": 0.2, "limit_bounds": {"compute": 3, "memory": 1}}, "<th>of the limit</th><td>10%</td>"),
        ({"loss": 2.5, "gap": 0.5, "another_update": False, "dropout": 0.0}, "<td>WRONG by 0.5</td>"),
        ({"loss": 2.5, "gap": 0.0, "another_update": False}, "<th>last loss</th><td>2.5000</td>"),
    ],
)
def test_verdicts_and_figures(row, said):
    assert said in planted(**row).replace('"', "")


def test_memory_has_its_verdict_too():
    naive, less, same = ({"name": name, "peak": peak} for name, peak in (("naive", 300), ("amp", 100), ("tf32", 300)))
    for row, other, said in (
        (less, naive, 'good"><strong>67 % less</strong> memory than naive'),
        (naive, less, 'bad"><strong>200 % more</strong> memory than amp'),
        (same, naive, 'same"><strong>the same</strong> memory as naive'),
    ):
        assert said in stage_cards.verdict(stage_cards.MEMORY, row, other)


def test_a_rung_of_the_recipe_shows_what_it_is_worth():
    step = {"times": 1.5, "low": 1.4, "high": 1.6, "n": 5}
    row = {
        "note": None,
        "verdict": "holds",
        "tokens": step,
        "step": step,
        "without": step | {"bound": "≥ "},
        "ms": 1.25,
        "gain": 1.2,
        "length": 0.5,
    }
    left_out = {"note": "kept at another scale: holds", "verdict": "holds", "without": step | {"times": 3.47}}
    small = Scale("code", 1_300_000, [], 200, {"muon": row})
    scales = [small, Scale("prose", 7_400_000, ["rotary"], 120, {"muon": left_out, "together": {"length": 0.25}})]
    shown = words(rung_cards.rung_card("amd-epyc-2-threads-bf16", "muon", scales))
    assert shown.startswith("AMD EPYC, 2 threads, native bfloat16 ") and "kept at another scale" not in shown
    assert "code 1.3 M, 100 steps prose 7.4 M, 30 steps, base with 1 rung tokens × 1.50 (1.40–1.60)" in shown
    assert "without ≥ 1.50 (1.40–1.60) 3.47 (1.40–1.60) time of a step × 1.25 gain 1.20" in shown
    assert (
        "On code, 1.3 million parameters: after 100 steps muon saves tokens: the recipe before it needs 1.50 times as "
        "many (1.40–1.60). On prose, 7.4 million parameters: after 30 steps the finished recipe without muon needs "
        "3.47 times the tokens (1.40–1.60)."
    ) in shown
    assert shown.endswith("The base with 1 rung has rotary.")
    assert words(rung_cards.rung_card("nowhere", "muon", [small])).startswith("nowhere Tokens")


def test_scales_of_one_size_and_corpus_share_a_sentence_and_code_comes_first():
    saves, costs = ({"note": None, "verdict": verdict, "step": {"times": 1.5}} for verdict in ("holds", "costs"))
    code = Scale("code", 1_300_000, [], 100, {"muon": saves | {"length": 1.0}})
    longer, prose = code._replace(max_steps=300), code._replace(corpus="prose", rows={"muon": costs | {"length": 9.0}})
    scales = sorted([prose, code, longer], key=lambda scale: figures.order(scale, "muon"))
    assert scales == [longer, code, prose]
    assert worth("muon", scales) == (
        "On code, 1.3 million parameters: after 300 steps muon saves tokens: the recipe before it needs 1.50 times as "
        "many; after 100 steps muon saves tokens: the recipe before it needs 1.50 times as many. On prose, 1.3 million "
        "parameters: after 900 steps muon costs tokens: the recipe before it needs 1.50 times as many."
    )


def test_what_a_rung_saves_by_loss_is_shown_without_the_losses_at_which_it_has_not_run(monkeypatch, tmp_path):
    gains = [{"bound": "≥ ", "times": 2.0}, {"times": 1.5, "low": 1.4, "high": 1.6}, None]
    rows = {"without muon": gains, "with relu2": gains, "without smear": [None] * 3, "base": gains}
    (tmp_path / "by_loss.json").write_text(json.dumps({"losses": [1.99, 1.55, 1.4], "gains": rows}))
    monkeypatch.setattr(figures, "BY_LOSS", {"1.3M": tmp_path, "3.5M": tmp_path})
    found = figures.by_loss.__wrapped__()
    assert found.keys() == {"muon", "relu2"}
    shown = words(rung_cards.by_loss_card(found["muon"]))
    small, large = (f"{scale} parameters, 1.99 bits per byte ≥ 2.00" for scale in ("1.3M", "3.5M"))
    assert shown.index(small) < shown.index(large) and "1.55 bits per byte 1.50 (1.40–1.60)" in shown
    assert "1.40 bits" not in shown
    assert by_loss("muon", found["muon"]) == (
        "the finished recipe's tokens without muon, divided by those with it: ≥ 2.00 at 1.99, 1.50 (1.40–1.60) at 1.55 "
        "bits per byte with 1.3M parameters; ≥ 2.00 at 1.99, 1.50 (1.40–1.60) at 1.55 bits per byte with 3.5M "
        "parameters."
    )


@pytest.mark.parametrize(
    "row, said",
    [
        ({"verdict": "costs", "step": {"times": 0.9}}, "x costs tokens: the recipe before it needs 0.90 times as many"),
        ({"verdict": "not significant (± 3%)", "step": {"times": 1.0}}, "x has no significant effect (±\u00a03%)"),
        ({"verdict": "kept, not confirmed"}, "x lowers the loss, which fresh seeds have yet to confirm"),
        ({"verdict": "diverges on 2 seeds", "step": {"times": 0.5}}, "x diverges on 2 seeds"),
        (
            {"verdict": "not significant (± 3%)", "without": {"times": 1.0}},
            "the finished recipe without x does not differ significantly (±\u00a03%)",
        ),
        (
            {"verdict": "holds", "without": {"times": 1.77, "bound": "≥ "}},
            "the finished recipe without x needs at least 1.77 times the tokens",
        ),
    ],
)
def test_every_verdict_on_a_rung_is_said_in_words(row, said):
    note = "kept at another scale" if "without" in row else None
    assert outcome("x", row | {"note": note}) == said


def test_every_rung_has_a_card_in_words(monkeypatch):
    """Every rung is measured by loss, the older ones have a sentence as well, and one without any runs says so."""
    for rung in stage_names(RECIPE_DIR)[1:]:
        shown = words(rung_cards.section(describe(rung)))
        assert shown.startswith("by loss Tokens of the finished recipe without it")
        assert rung in ("sampled_softmax", "exclusive_attention") or re.search(
            r"On code, [\d.]+ million parameters: ", shown
        )
        assert not re.search(r"amd-epyc|another scale|fresh lr|kept yes", shown), rung
    assert {"muon", "untied"} <= set(re.findall(r'href="#(\w+)"', rung_cards.section(describe("base"))))
    monkeypatch.setattr(rung_cards, "by_loss", lambda: {})
    unmeasured = dataclasses.replace(describe("muon"), figures={})
    assert words(rung_cards.section(unmeasured)) == "No run has measured muon yet."


# -- a reader's own results


def own_results(folder, evil):
    """A runs.jsonl in which every text is markup."""
    conditions, found = runs.read(ROOT / "results/amd-epyc-2-threads-bf16/reference/runs.jsonl", STEPS)
    machine = conditions["machine"] | dict.fromkeys(("gpu", "torch", "python"), evil)
    lines = [conditions | {"machine": machine, "config": [evil], "code": evil, "commit": evil}]
    lines += [run.row | {"name": evil, "figures": run.figures} for run in found if run.row.get("name") == "naive"]
    for run in found:
        failed = run.row.get("name") == "tf32" and run.row["what"] == "time"
        lines.append(run.row | ({"failed": evil} if failed else {"figures": run.figures}))
    path = folder / evil.replace("/", "") / "yours" / "runs.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_own_results_come_first_and_none_of_their_texts_becomes_markup(tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    path = own_results(tmp_path, evil)
    seen, said = set(), []
    assert list(figures.measured("ladder", (path,)))[1:] == list(figures.measured("ladder"))
    parser = HTMLParser()
    parser.handle_starttag = lambda name, attributes: seen.update([name], (key for key, _ in attributes))
    parser.handle_data = said.append
    for stage in ("naive", "tf32", "amp"):
        parser.feed(stage_cards.section(describe(stage, (path,))))
    parser.feed(stage_cards.options((path,)))
    known = (
        "section article h3 h4 small details summary p b strong table thead tbody tr th td svg path a i "
        "option class data-set data-kind viewbox preserveaspectratio d href aria-hidden aria-label value"
    )
    assert seen <= set(known.split())
    assert " ".join(said).count(evil) > 10


def test_html_writes_the_page(run_main, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "page", lambda paths: f"<p>naïve {len(paths)}")
    monkeypatch.chdir(tmp_path)
    assert run_main(ladder.main, "html").out == "wrote out/pages/index.html: open it in a browser\n"
    assert (tmp_path / "out/pages/index.html").read_text(encoding="utf-8") == "<p>naïve 0"
    ours = own_results(tmp_path, "mine")
    for path, words in ((ours.with_name("ladder.html"), []), (tmp_path / "a/b.html", ["--output=a/b.html"])):
        assert run_main(ladder.main, "html", str(ours), *words).code == 0
        assert path.read_text(encoding="utf-8") == "<p>naïve 1"
    assert "a/b.html/c cannot be written" in refused(ladder.main, "html", "--output=a/b.html/c")


def test_a_file_without_a_ladder_is_refused(tmp_path):
    path = own_results(tmp_path, "mine")
    for text, answer in (
        ("{}\n", "not a file of runs"),
        (path.read_text().replace('"ladder"', '"sweep"'), "--mode=ladder"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=answer):
            figures.check((path,))
    path.unlink()
    with pytest.raises(BadInput, match="does not exist"):
        figures.check((path,))
