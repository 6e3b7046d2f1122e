"""docs/ladder.md and ladder.html match this code and the figures in results/; no text becomes markup."""

import html
import json
import re
import statistics
from html.parser import HTMLParser

import pytest
from conftest import ROOT

import ladder
from lab.measure import runs, summary
from lab.measure.results import STEPS, read_results
from lab.measure.tables import KINDS
from lab.programs import pages
from lab.programs.page import build, figures, programs, rungs
from lab.programs.page.markup import Markup, tag
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


@pytest.fixture(scope="module")
def text():
    return build.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_pages_match_this_code(text):
    """If they do not, run python ladder.py docs and python ladder.py html. They contain every program."""
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page()
    assert text == build.page()
    lines, ladder = programs.table()
    for stage in ladder["stages"]:
        program = pages.script(stage["name"]).splitlines()
        assert [html.unescape(re.sub(r"<[^>]*>", "", lines[n])) for n in stage["lines"]] == program


def test_the_readme_has_the_ladder_as_it_was_measured():
    """If not, run python ladder.py docs. Here because it simulates the page's statistics, which takes seconds."""
    assert pages.README.read_text(encoding="utf-8") == pages.readme()


def test_the_page_is_small_and_has_every_stage(text):
    assert len(text.encode()) < 1_500_000
    assert re.findall(r"<article id=(\w+) class=stage ", text) == pages.BOTH


def test_the_rail_groups_stages_that_follow_each_other():
    groups = [pages.group(stage) for stage in pages.BOTH]
    assert [name for n, name in enumerate(groups) if name != groups[n - 1] or n == 0] == list(build.GROUPS)
    assert pages.group("chunked_loss") == "speed" and pages.group("checkpointing") == "memory"
    assert build.rail().count("<li class=group>") == len(build.GROUPS)


def test_texts_are_escaped():
    value = {"</script><script>alert(1)": ["<!--", "é"]}
    assert "<" not in build.embedded(value) and json.loads(build.embedded(value)) == value
    found = build.text("a < b, `x & y`\n\n**Why:** c > d\n\n**Source:**\n- [<b>](https://a.b/?c&d)")
    assert "<p>a &lt; b, <code>x &amp; y</code></p>" in found and "<dd>c &gt; d</dd>" in found
    assert '<a href="https://a.b/?c&amp;d" rel="noreferrer">&lt;b&gt;</a>' in found
    assert tag("p", "<b>", Markup("<i>"), title='"<', class_="x") == '<p title="&quot;&lt;" class="x">&lt;b&gt;<i></p>'


# -- figures


def card(key, stage):
    return figures.stage_card(key, *pages.summaries("ladder")[key], stage)


def words(markup):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_every_machine_is_listed_and_that_of_the_readme_comes_first():
    assert MEASURED.keys() == pages.summaries("ladder").keys()
    assert re.findall(r'data-set="(.+?)"', figures.section("amp")) == list(pages.summaries("ladder"))
    assert next(iter(pages.summaries("ladder"))) == "/".join(pages.MEASURED["two cores"].parts[-2:])
    assert re.findall(r'value="(.+?)"', figures.options()) == list(pages.summaries("ladder"))


@pytest.mark.parametrize("key", MEASURED)
def test_bars_and_parts_are_those_of_the_runs(key):
    _, results = MEASURED[key]
    rows = {name: row for name, row in results["modes"]["ladder"]["rows"].items() if "time" in row}
    median = {name: statistics.median(process["seconds"] for process in row["time"]) for name, row in rows.items()}
    for stage in (stage for stage in STAGES if stage in rows):
        row, raw = pages.summaries("ladder")[key][1][stage], rows[stage]["profile"][0]
        kinds, parts = figures.TIME.parts(row), figures.MEMORY.parts(row)
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
        assert f"Time of a step {figures.tables.milliseconds(median[stage])} ms" in said
        assert f"Memory of a step {raw['memory']['peak'] / 1e9:.3f} GB" in said
        shown = figures.tables.milliseconds(kinds["attention"], median[stage])
        assert re.search(rf"attention [\d.]+ {shown} ", words(time))


@pytest.mark.parametrize("stage", pages.SCALING)
def test_stages_of_several_processes_have_the_figures_of_their_mode(stage):
    mode = pages.SCALING[stage]
    holding = [results for results in RESULTS.values() if mode in results["modes"]]
    cards = [card for card in figures.section(stage).split("</article>") if "Tokens per second" in card]
    assert len(cards) == len(holding) > 0
    for card, results in zip(cards, holding, strict=True):
        for n, row in results["modes"][mode]["rows"].items():
            if row["time"]:
                median = statistics.median(process["seconds"] for process in row["time"])
                assert f"{n} process" in words(card) and f"{row['time'][0]['tokens'] / median:,.0f}" in words(card)
        assert " ".join(results["config"]) in words(card)


def test_the_first_stage_has_a_bar_of_each_and_says_what_all_gain():
    key, (_, rows) = next(iter(pages.summaries("ladder").items()))
    assert pages.gain(rows.values()) in words(build.opening("naive"))
    timed = {name for name, row in rows.items() if "seconds" in row}
    assert set(re.findall(r'href="#(\w+)"', card(key, "naive"))) == timed - {"naive"}


def planted(**row):
    """Figures of amp beside naive's."""
    naive = {"name": "naive", "note": None, "seconds": 2.0, "rounds": [2.0] * 3, "shares": dict.fromkeys(KINDS, 0.1)}
    rows = {"naive": naive, "amp": naive | {"name": "amp"} | row}
    summary.add_gains(list(rows.values()), "ladder")
    return figures.stage_card("a/b", RESULTS[FILES[0]], rows, "amp")


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
        (less, naive, 'good"><strong>3.00×</strong> as small as naive'),
        (naive, less, 'bad"><strong>0.33×</strong> as small as amp'),
        (same, naive, 'same"><strong>1.00×</strong> as small as naive'),
    ):
        assert said in figures.verdict(figures.MEMORY, row, other)


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
    }
    left_out = {"note": "kept at another scale: holds", "verdict": "holds", "without": step | {"times": 3.47}}
    small = rungs.Scale("small", 1_300_000, [], {"muon": row})
    scales = [small, rungs.Scale("medium", 7_400_000, ["rotary"], {"muon": left_out})]
    shown = words(rungs.rung_card("amd-epyc-2-threads-bf16", "muon", scales))
    assert shown.startswith("AMD EPYC, 2 threads, native bfloat16 ") and "kept at another scale" not in shown
    assert "small 1.3 M medium 7.4 M tokens × 1.50 (1.40–1.60) over the last kept 1.50 (1.40–1.60) without" in shown
    assert "≥ 1.50 (1.40–1.60) 3.47 (1.40–1.60) time of a step × 1.25 gain 1.20" in shown and " alone 1" not in shown
    assert (
        "At 1.3 million parameters muon saves tokens: the recipe before it needs 1.50 times as many; at 7.4 million "
        "parameters the finished recipe without muon needs 3.47 times the tokens."
    ) in shown
    assert shown.endswith("The base of medium has rotary.")
    assert words(rungs.rung_card("nowhere", "muon", [small])).startswith("nowhere Tokens")


def test_what_a_rung_is_worth_on_another_corpus_is_reported_separately():
    saves, costs = ({"note": None, "verdict": verdict, "step": {"times": 1.5}} for verdict in ("holds", "costs"))
    code = rungs.Scale("small", 1_300_000, [], {"muon": saves})
    assert rungs.sentence("muon", [code, code._replace(rows={"muon": costs}, corpus="prose")]) == (
        "At 1.3 million parameters muon saves tokens: the recipe before it needs 1.50 times as many; at 1.3 million "
        "parameters on prose muon costs tokens: the recipe before it needs 1.50 times as many."
    )


@pytest.mark.parametrize(
    "row, said",
    [
        ({"verdict": "costs", "step": {"times": 0.9}}, "x costs tokens: the recipe before it needs 0.90 times as many"),
        ({"verdict": "not seen (± 3%)", "step": {"times": 1.0}}, "x makes no difference that can be seen (±\u00a03%)"),
        ({"verdict": "kept, not confirmed"}, "x lowers the loss, which fresh seeds have yet to confirm"),
        ({"verdict": "diverges on 2 seeds", "step": {"times": 0.5}}, "x diverges on 2 seeds"),
        (
            {"verdict": "not seen (± 3%)", "without": {"times": 1.0}},
            "the finished recipe without x is as good, as far as can be seen (±\u00a03%)",
        ),
        (
            {"verdict": "holds", "without": {"times": 1.77, "bound": "≥ "}},
            "the finished recipe without x needs at least 1.77 times the tokens",
        ),
    ],
)
def test_every_verdict_on_a_rung_is_said_in_words(row, said):
    note = "kept at another scale" if "without" in row else None
    assert rungs.outcome("x", row | {"note": note}) == said


def test_every_rung_has_a_card_in_words(monkeypatch):
    """Every measured rung has a sentence, and one that no run has measured says so."""
    for rung in stage_names(RECIPE_DIR)[1:]:
        shown = words(rungs.section(rung))
        assert f"No run has measured {rung} yet." == shown or re.search(r"At [\d.]+ million parameters .*\.", shown)
        assert not re.search(r"amd-epyc|another scale|fresh lr|kept yes", shown), rung
    assert {"muon", "ema"} <= set(re.findall(r'href="#(\w+)"', rungs.section("base")))
    monkeypatch.setattr(pages, "RESULTS", pages.RESULTS / "nowhere")
    assert words(rungs.section("muon")) == "No run has measured muon yet."


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
    assert list(pages.summaries("ladder", (path,)))[1:] == list(pages.summaries("ladder"))
    parser = HTMLParser()
    parser.handle_starttag = lambda name, attributes: seen.update([name], (key for key, _ in attributes))
    parser.handle_data = said.append
    for stage in ("naive", "tf32", "amp"):
        parser.feed(figures.section(stage, (path,)))
    parser.feed(figures.options((path,)))
    known = (
        "section article h3 h4 small details summary p b strong table thead tbody tr th td svg path a i "
        "option class data-set data-kind viewbox preserveaspectratio d href aria-hidden aria-label value"
    )
    assert seen <= set(known.split())
    assert " ".join(said).count(evil) > 10


def test_html_writes_the_page(run_main, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "PAGE", tmp_path / "docs" / "ladder.html")
    monkeypatch.setattr(build, "page", lambda own: f"<p>naïve {len(own)}")
    build.PAGE.parent.mkdir()
    assert run_main(ladder.main, "html").code == 0
    assert build.PAGE.read_text(encoding="utf-8") == "<p>naïve 0"
    ours = own_results(tmp_path, "mine")
    found = run_main(ladder.main, "html", str(ours))
    assert ours.with_name("ladder.html").read_text(encoding="utf-8") == "<p>naïve 1"
    assert f"wrote {ours.with_name('ladder.html')}" in found.out


def test_a_file_without_a_ladder_is_refused(tmp_path):
    path = own_results(tmp_path, "mine")
    for text, answer in (
        ("{}", "not a results file"),
        (path.read_text().replace('"ladder"', '"sweep"'), "--mode=ladder"),
    ):
        path.write_text(text)
        pages.summaries.cache_clear()
        with pytest.raises(BadInput, match=answer):
            build.page((path,))
