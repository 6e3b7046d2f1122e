"""Figures of the page: those of results.json and of its tables, in Python, and in a browser, for a dropped file too."""

import copy
import json
import re
import statistics
from html.parser import HTMLParser

import pytest
from browser import chromium
from conftest import ROOT

from lab.page import build, figures
from nanoladder.config import stage_names

FILES = sorted((ROOT / "results").glob("*/*/results.json"))
MEASURED = [
    (path, mode) for path in FILES for mode in ("ladder", "each") if mode in json.loads(path.read_text())["modes"]
]
REFERENCE = ROOT / "results" / "amd-epyc-2-threads-bf16" / "reference" / "results.json"
IDS = [f"{path.parent.parent.name}/{path.parent.name}/{mode}" for path, mode in MEASURED]


def sets():
    return {found["id"]: found for found in figures.figures()["sets"]}


def markdown_rows(text):
    """{row: {heading: cell}} of the first table of a Markdown text."""
    lines = re.search(r"(^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: dict(zip(cells[0][1:], line, strict=False)) for name, *line in cells[2:]}


# -- in Python


def test_every_machine_and_config_has_its_figures():
    predicted = sorted((ROOT / "results").glob("*/*/predict.md"))
    assert set(IDS) | {f"{p.parent.parent.name}/{p.parent.name}/predict" for p in predicted} == set(sets())
    assert predicted
    json.dumps(figures.figures(), allow_nan=False)
    assert sets()[figures.figures()["default"]]["mode"] == "ladder"


@pytest.mark.parametrize("path, mode", MEASURED, ids=IDS)
def test_figures_are_those_of_results_json(path, mode):
    raw = json.loads(path.read_text())["modes"][mode]["rows"]
    found = sets()[f"{path.parent.parent.name}/{path.parent.name}/{mode}"]["rows"]
    assert [row["name"] for row in found] == list(raw)
    for row in found:
        measured = raw[row["name"]]
        assert row["note"] == measured["note"]
        assert ("seconds" in row) == bool(measured["time"])
        if measured["time"]:
            memory = measured["examine"][0]["memory"]
            seconds = statistics.median(process["seconds"] for process in measured["time"])
            assert row["seconds"] == pytest.approx(seconds, rel=1e-5)
            assert sum(row["kinds"].values()) == pytest.approx(seconds, rel=1e-4)
            profiled = measured["examine"][0]
            gemm = profiled["seconds_by_kind"]["gemm"] / profiled["profiled_seconds"] * seconds
            assert row["kinds"]["gemm"] == pytest.approx(gemm, rel=1e-5)
            assert row["parts"]["activations"] == memory["activations"]
            assert row["peak"] == memory["peak"] == sum(row["parts"].values())


@pytest.mark.parametrize("path, mode", MEASURED, ids=IDS)
def test_texts_are_those_of_the_tables(path, mode):
    _, found = next(
        part for part in re.findall(r"## (\S+): ((?:(?!\n## ).)*)", table_of(path), re.DOTALL) if part[0] == mode
    )
    lines = markdown_rows(found)
    for row in (row for row in sets()[IDS[MEASURED.index((path, mode))]]["rows"] if "seconds" in row):
        cells, naive, before = lines[row["name"]], row.get("naive", {}), row.get("before", {})
        assert cells["ms/step"] == f"{1e3 * row['seconds']:.{0 if row['seconds'] > 0.1 else 1}f}"
        assert cells.get("losses against naive", "") == row.get("loss", "")
        assert cells["last loss"] == row["last_loss"]
        if mode == "ladder":
            assert cells.get("against naive", "") == naive.get("speed", "")
            assert cells.get("against the stage before", "") == before.get("speed", "")
            assert cells["memory reduction"] == naive.get("memory", "1.00×")
        else:
            assert cells["speed"] == naive.get("speed", "") and not before


def table_of(path):
    return (path.parent / "table.md").read_text()


def test_predicted_figures_are_those_of_predict_md():
    row = {row["name"]: row for row in sets()["h100-predicted/gpt2/predict"]["rows"]}
    text = (ROOT / "results/h100-predicted/gpt2/predict.md").read_text()
    for name, _, peak in re.findall(r"^(\w+)\*? +((?:[\d.]+ +){5})([\d.]+)", text, re.MULTILINE):
        least, bound = re.search(rf"^\| {name} +\| ([\d,]+) +\| (\w+ \d+%)", text, re.MULTILINE).groups()
        assert row[name]["peak"] == round(1e9 * float(peak))
        assert row[name]["kinds"] == {"least": float(least.replace(",", "")) / 1e3}
        assert row[name]["bound"] == bound
        assert sum(row[name]["parts"].values()) == pytest.approx(row[name]["peak"], rel=0.003)
    assert row["tf32"]["before"]["speed"] == row["tf32"]["naive"]["speed"] == "2.68×"


@pytest.mark.parametrize("stage", ["ddp", "shard", "tensor_parallel", "context_parallel", "pipeline_parallel"])
def test_stages_of_several_processes_have_the_figures_of_their_mode(stage):
    scaled = figures.figures()["scaling"][stage]
    mode = figures.figures()["scaling_modes"][stage]
    holding = [path for path in FILES if mode in json.loads(path.read_text())["modes"]]
    assert len(scaled) == len(holding) > 0
    for path, found in zip(holding, scaled, strict=True):
        raw = json.loads(path.read_text())["modes"][mode]["rows"]
        for n, tokens_per_s, _ in found["rows"]:
            timed = raw[str(n)]["time"]
            median = statistics.median(process["seconds"] for process in timed)
            assert tokens_per_s == pytest.approx(timed[0]["tokens"] / median, rel=1e-5)
        assert f"{found['rows'][-1][1]:,.0f}" in figures.static_html(stage)


def test_tables_without_script_hold_every_machine_of_a_stage():
    text = figures.static_html("amp")
    for found in figures.figures()["sets"]:
        row = next((row for row in found["rows"] if row["name"] == "amp"), None)
        if row:
            assert found["machine"] in text and f"{row['peak'] / 1e9:.3f}" in text and row["naive"]["speed"] in text
    assert text.count("<tr>") == 1 + sum("amp" in {row["name"] for row in found["rows"]} for found in sets().values())


def test_tables_without_script_are_escaped(monkeypatch):
    evil = "<script>alert(1)</script>&\"'"
    row = {"name": "amp", "note": None, "seconds": 1.0, "peak": 1, "loss": evil}
    rows = [row | {"naive": {"name": evil, "speed": evil, "memory": evil}}, {"name": "amp", "note": evil}]
    planted = {"sets": [{"machine": evil, "name": evil, "rows": rows}], "scaling": {}}
    monkeypatch.setattr(figures, "figures", lambda: planted)
    seen, text = [], []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: seen.append(tag)
    parser.handle_data = text.append
    parser.feed(figures.static_html("amp"))
    assert set(seen) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert "".join(text).count(evil) == 8


def luminance(color):
    linear = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in linear]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("light", [0, 1], ids=["light", "dark"])
def test_colors_have_enough_contrast(light):
    style = build.read("page.css") + build.read("worth.css")
    colors = {name: pair[light] for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)}
    for name in ("ink", "soft", "worth-good", "worth-bad"):
        assert contrast(colors[name], colors["card"]) >= 4.5, name
    for name in ("gemm", "attention", "loss", "elementwise", "optimizer", "data", "host"):
        assert contrast(colors[f"worth-{name}"], colors["card"]) >= 3, name


# -- in a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return small_page(tmp_path_factory.mktemp("page") / "page.html", figures.figures())


def small_page(path, data):
    """Writes a small page that holds figures, their scripts and their style, as docs/ladder.html does; its address."""
    style = build.read("page.css") + build.read("worth.css")
    scripts = "".join(f"<script>{build.read(name)}</script>" for name in build.SCRIPTS if name != "climb.js")
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>figures</title><style>{style}</style>"
        "<main><div id=machine></div><div id=worth></div></main>"
        f'<script type="application/json" id=figures>{build.embedded(data)}</script>{scripts}'
    )
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The opened page; fails the test if its script fails, asks for anything else, or opens a dialog."""
    opened, failures = browser.new_page(reduced_motion="reduce"), []
    opened.on("pageerror", lambda error: failures.append(str(error)))
    opened.on("dialog", lambda dialog: (failures.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda request: request.url == address or failures.append(request.url))
    opened.goto(address)
    yield opened
    opened.close()
    assert failures == []


def drop(page, text, name="results.json"):
    """Drops a file on the page and waits until it says something."""
    page.evaluate(
        """([text, name]) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], name));
            document.querySelector("#worth").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
        }""",
        [text, name],
    )
    page.wait_for_function(
        "document.querySelector('[role=alert]').textContent + document.querySelector('[role=status]').textContent"
    )


def bars(page, chart, card=1):
    """[(label, {part: width as a share of the scale})] of the bars of a card's chart (1: time, 2: memory)."""
    return page.evaluate(
        """([card, chart]) => [...document.querySelectorAll(`.worth-machines .worth-card:nth-child(${card})
            .worth-chart:nth-of-type(${chart}) .worth-bar:not(.worth-away)`)].map((bar) => [
            bar.querySelector(".worth-name").textContent,
            Object.fromEntries([...bar.querySelectorAll("i")].map((part) => [part.dataset.part,
                part.getBoundingClientRect().width / bar.querySelector(".worth-track").getBoundingClientRect().width])),
        ])""",
        [card, chart],
    )


def same(a, b):
    """True if two JSON values are equal, but for the last digits of numbers."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == pytest.approx(b, rel=2e-5, abs=1e-9)
    return a == b


def variants():
    """Texts of results.json: every committed one, and one of a GPU, with limits, dropout and a row that failed."""
    yield from (path.read_text() for path in dict.fromkeys(path for path, _ in MEASURED))
    results = json.loads(REFERENCE.read_text())
    results["machine"] |= {"gpu": "NVIDIA H200", "cuda": "13.0", "cudnn": 91002}
    results["keys"]["dropout"] = 0.1
    rows = results["modes"]["ladder"]["rows"]
    kinds = {"gemm": 0.3, "attention": 0.11, "elementwise": 0.07}
    for row in list(rows.values())[:9]:
        row["limit"] = {"fused": 0.2, "kinds": kinds, "bounds": {"compute": 0.37, "memory": 0.11}}
    rows["amp"]["examine"][0]["losses"][2] += 0.034
    rows["tf32"] |= {"examine": [], "time": [], "note": "failed | out of memory"}
    rows["loader"]["time"] = rows["loader"]["time"][:1]
    rows["flash"]["time"] = rows["flash"]["time"][:2]
    rows["compile"]["words"].append("--optimizer=muon")
    yield json.dumps(results)


def test_the_browser_computes_what_python_does(page):
    for text in variants():
        results = json.loads(text)
        expected = [
            json.loads(json.dumps({"name": None, **figures.measured(results, mode)}))
            for mode in figures.MODES
            if mode in results["modes"]
        ]
        found = json.loads(page.evaluate("text => Dropped.read(new Blob([text])).then(JSON.stringify)", text))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            for a, b in zip(ours["rows"], theirs["rows"], strict=True):
                assert same(a, b), (a, b)
            assert same(ours | {"name": None}, theirs), (ours["conditions"], theirs["conditions"])


def test_the_browser_has_its_constants_from_python(browser, tmp_path):
    planted = {"format_version": 3, "unchanged": "even", "same_loss": 0.05}
    assert planted.keys() <= figures.figures().keys()
    page = browser.new_page()
    page.goto(small_page(tmp_path / "page.html", figures.figures() | planted))
    *_, text = variants()
    drop(page, text)
    assert "no format_version 3" in page.text_content("[role=alert]")
    newer = text.replace('"format_version": 2', '"format_version": 3')
    [found] = page.evaluate("text => Dropped.read(new Blob([text]))", newer)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["amp"]["loss"] == "within 3e-02"  # 0.034
    assert rows["set_to_none"]["naive"]["speed"] == "even"
    page.close()


@pytest.mark.parametrize("stage", ["naive", "amp", "low_memory_optimizer"])
def test_bars_are_the_figures(stage, page):
    found = sets()[figures.figures()["default"]]["rows"]
    rows = {row["name"]: row for row in found}
    page.evaluate("stage => Worth.show(stage)", stage)
    for chart, total, parts in ((1, "seconds", "kinds"), (2, "peak", "parts")):
        scale = max(row[total] for row in found if "seconds" in row)
        drawn = bars(page, chart)
        assert [label for label, _ in drawn][-1] == stage
        assert len(drawn) == (1 if stage == "naive" else 3)
        for label, widths in drawn:
            for part, value in rows[label][parts].items():
                assert widths[part] == pytest.approx(value / scale, abs=3e-3), (label, part)
    label = page.get_attribute(".worth-chart .worth-bar[data-n=now] .worth-track", "aria-label")
    assert label.startswith(f"{stage}: {1e3 * rows[stage]['seconds']:.0f} ms: matrix products ")
    cells = page.locator(".worth-chart:nth-of-type(1) .worth-legend tbody tr:nth-child(2) td").all_text_contents()
    assert f"{1e3 * rows[stage]['kinds']['attention']:.0f}" in cells


def climb(page, machine):
    """{stage: what its card says} on a machine."""
    page.select_option("#worth-machine", machine)
    return page.evaluate(
        """(stages) => Object.fromEntries(stages.map((stage) => {
            Worth.show(stage);
            const text = (name) => document.querySelector(`.worth-machines ${name}`).textContent;
            const scaled = document.querySelectorAll(".worth-scaling .worth-card").length;
            const [note, verdict, loss] = [text(".worth-note"), text(".worth-verdict"), text(".worth-loss")];
            return [stage, { note, verdict, loss, scaled }];
        }))""",
        stage_names(),
    )


def test_every_stage_says_on_every_machine_what_the_tables_say(page):
    for found in sets().values():
        rows = {row["name"]: row for row in found["rows"]}
        for stage, said in climb(page, found["id"]).items():
            row = rows.get(stage, {})
            assert said["scaled"] == len(figures.figures()["scaling"].get(stage, []))
            assert said["note"].startswith(f"{stage}: " if "seconds" not in row else "")
            assert bool(said["note"]) == ("seconds" not in row)
            assert (row.get("note") or "") in said["note"]
            if other := "seconds" in row and (row.get("before") or row.get("naive")):
                speed, _, interval = other["speed"].partition(" (")
                unchanged = other["speed"] == "no measurable change"
                assert said["verdict"].startswith("no measurable change against" if unchanged else speed)
                assert said["verdict"].endswith(other["name"] if unchanged else interval)
                assert row.get("loss", "") in said["loss"]


def test_the_limit_is_marked_and_said(page):
    *_, text = variants()
    drop(page, text)
    page.evaluate("Worth.show('naive')")
    card = page.locator(".worth-card").nth(1)
    assert card.locator(".worth-limit:visible").count() == 1  # in the bar of now
    said = card.locator(".worth-of-limit").first.text_content()
    assert said.startswith("10% of the limit: 480 ms by roofline, bound by compute 77%"), said


def test_on_a_narrow_phone_a_command_breaks_between_options_and_a_wide_table_scrolls_in_its_card(page):
    page.set_viewport_size({"width": 320, "height": 800})
    page.evaluate("Worth.show('tensor_parallel')")
    command = page.locator(".worth-scaling .worth-fine").first
    assert re.search(r" profile\.py config/\S+( --\w+=\S+)* --mode=scaling-tensor\s*$", command.text_content())
    assert command.evaluate("p => p.getBoundingClientRect().height / parseFloat(getComputedStyle(p).fontSize) > 3")
    lines = command.evaluate("p => [...p.children].map((word) => word.getClientRects().length)")
    assert len(lines) > 5 and set(lines) == {1}
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_conditions_show_by_keyboard_and_by_mouse(page):
    tip, button = page.locator("[role=tooltip]"), page.locator(".worth-conditions button")
    assert tip.is_hidden()
    button.focus()
    assert tip.is_visible() and "torch 2.13.0+cpu" in tip.text_content()
    assert page.get_attribute(".worth-conditions button", "aria-describedby") == tip.get_attribute("id")
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    button.hover()
    assert tip.is_visible()


def test_the_machine_is_kept_and_storage_may_refuse(browser, address):
    chosen, refusing = "intel-xeon-2-threads-bf16/gpt2/ladder", browser.new_page()
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        page.select_option("#worth-machine", chosen)
        page.reload()
        assert page.input_value("#worth-machine") == chosen
    refusing.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused') } })")
    refusing.goto(address)
    refusing.select_option("#worth-machine", chosen)
    assert "Intel Xeon" in refusing.text_content(".worth-card h3")
    refusing.close()


def test_bars_move_unless_motion_is_unwanted(browser, address):
    for motion, expected in (("no-preference", "0.35s"), ("reduce", "0s")):
        page = browser.new_page(reduced_motion=motion)
        page.goto(address)
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.worth-track i')).transitionDuration") == expected
        )
        page.close()


# -- files of readers


def test_a_dropped_file_is_drawn_beside_ours(page):
    results = json.loads(REFERENCE.read_text())
    results["machine"]["cpu"] = "A Machine of Yours"
    for row in results["modes"]["ladder"]["rows"].values():
        row["time"] = [process | {"seconds": process["seconds"] / 10} for process in row["time"]]
    ours = bars(page, 1)
    drop(page, json.dumps(results))
    titles = page.locator(".worth-card h3").all_text_contents()
    assert len(titles) == 2 and titles[1].startswith("yours: A Machine of Yours, 2 threads")
    assert "beside ours" in page.text_content("[role=status]") and page.text_content("[role=alert]") == ""
    assert [label for label, _ in bars(page, 1)] == [label for label, _ in ours]
    assert bars(page, 1)[0][1] == pytest.approx(ours[0][1], abs=3e-3)
    page.evaluate("Worth.show('amp')")
    totals = page.locator(".worth-chart:nth-of-type(1) .worth-total").all_text_contents()
    assert totals == ["1654 ms", "165 ms"]
    assert page.locator(".worth-verdict strong").first.text_content() == "1.96×"
    assert page.locator(".worth-card").nth(1).locator(".worth-verdict strong").first.text_content() == "1.96×"


def test_a_file_can_be_chosen_by_a_button(page):
    page.set_input_files(
        "#worth-file", {"name": "r.json", "mimeType": "application/json", "buffer": REFERENCE.read_bytes()}
    )
    page.wait_for_selector(".worth-card:nth-child(2)")
    page.focus("#worth-file")  # reached by keyboard


def broken(change):
    """The reference's results.json after change(results), as text."""
    results = json.loads(REFERENCE.read_text())
    change(results)
    return json.dumps(results)


def naive(results):
    return results["modes"]["ladder"]["rows"]["naive"]


BAD = {
    "empty": ("", "it is not JSON"),
    "text": ("hello", "it is not JSON"),
    "cut": (REFERENCE.read_text()[:5000], "it is not JSON"),
    "null": ("null", "format_version"),
    "list": ("[1, 2]", "format_version"),
    "foreign": ('{"name": "package", "version": "1.0"}', "format_version"),
    "older": (broken(lambda r: r.update(format_version=1)), "format_version"),
    "no modes": (broken(lambda r: r.pop("modes")), "results.modes should be object, not undefined"),
    "modes": (broken(lambda r: r.update(modes=[])), "results.modes should be object, not array"),
    "only others": (broken(lambda r: r.update(modes={"sweep": {}})), "neither --mode=ladder"),
    "no machine": (broken(lambda r: r.pop("machine")), "results.machine should be object"),
    "no keys": (broken(lambda r: r.pop("keys")), "results.keys should be object"),
    "rows": (broken(lambda r: r["modes"]["ladder"].update(rows=7)), "ladder.rows should be object, not number"),
    "row": (
        broken(lambda r: r["modes"]["ladder"]["rows"].update(naive="x")),
        "ladder.naive should be object, not string",
    ),
    "text for a number": (
        broken(lambda r: naive(r)["time"][0].update(seconds="4")),
        "seconds should be number, not string",
    ),
    "infinite": (
        broken(lambda r: naive(r)["time"][0].update(seconds=1)).replace('"seconds": 1,', '"seconds": 1e999,'),
        "is Infinity",
    ),
    "huge": (broken(lambda r: naive(r)["time"][0].update(seconds=1e308)), "is 1e+308; expected"),
    "negative": (broken(lambda r: naive(r)["time"][0].update(seconds=-1)), "is -1; expected"),
    "zero": (broken(lambda r: naive(r)["time"][0].update(seconds=0)), "is 0; expected"),
    "huge memory": (broken(lambda r: naive(r)["examine"][0]["memory"].update(peak=1e300)), "peak is 1e+300"),
    "no memory": (broken(lambda r: naive(r)["examine"][0].pop("memory")), "memory should be object"),
    "losses": (broken(lambda r: naive(r)["examine"][0].update(losses=[1.0])), "losses are not as many"),
    "inherited": (broken(lambda r: r.update(config="constructor")), "results.config should be array"),
    "deep": ("[" * 400_000 + "]" * 400_000, "format_version"),
    "deep inside": (
        '{"format_version": 2, "modes": ' + '{"ladder": ' * 100_000 + "1" + "}" * 100_001,
        "results.keys should be object",
    ),
}


def test_a_damaged_or_foreign_file_gets_one_line(page):
    for name, (text, what) in BAD.items():
        drop(page, text, f"{name}.json")
        said = page.text_content("[role=alert]")
        assert said.startswith(f"{name}.json is not a results.json of profile.py: ") and "\n" not in said
        assert what in said, name
        assert page.locator(".worth-card").count() == 1 and page.text_content("[role=status]") == ""
        page.evaluate("Worth.show('amp')")
        assert page.text_content(".worth-total") == "1654 ms"
    drop(page, REFERENCE.read_text())  # a good one afterwards
    assert page.locator(".worth-card").count() == 2 and page.text_content("[role=alert]") == ""


def test_a_file_of_100_mb_is_not_read(page):
    page.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            const file = new File([new Uint8Array(100e6)], "big.json");
            file.text = () => { throw new Error("read") };
            dataTransfer.items.add(file);
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
        }"""
    )
    page.wait_for_function(
        "document.querySelector('[role=alert]').textContent.includes('it has 100 MB; expected at most 16')"
    )


def hostile():
    """A results.json whose every text is markup, with names of prototypes as keys."""
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>javascript:alert(3)\"'"
    results = json.loads(REFERENCE.read_text())
    results["machine"] |= dict.fromkeys(("cpu", "gpu", "torch", "python"), evil)
    results |= {"config": [evil, f"{evil}.py"], "code": evil, "commit": evil}
    ours = results["modes"]["ladder"]["rows"]
    rows = {evil: copy.deepcopy(ours["naive"])}  # the first, which each is measured against
    for name, row in ours.items():
        rows |= {f"{evil} before {name}": copy.deepcopy(row), name: row}
    for name in ("__proto__", "constructor", "toString", "x" * 100_000):
        rows[name] = copy.deepcopy(rows["flash"])
    rows["tf32"] |= {"note": evil, "time": []}
    rows["amp"]["limit"] = {"fused": 1, "kinds": {"gemm": 0.2, "__proto__": 1}, "bounds": {evil: 3, "__proto__": 2}}
    rows["loader"]["examine"][0]["memory"] = dict.fromkeys(
        ("weights", "optimizer", "activations", "rest", "peak"), 1e16
    )
    rows["loader"]["time"] = [{"seconds": seconds} for seconds in (1e6, 1e-9, 1e6)]
    results["modes"]["ladder"]["rows"] = rows
    results["__proto__"] = {"hacked": True}
    return json.dumps(results)


def test_a_hostile_file_does_nothing(page):
    elements = "document.querySelectorAll('script, img, iframe, [onerror]').length"
    before = page.evaluate(elements)
    drop(page, hostile(), "<img src=x onerror=alert(4)>.json")
    assert page.locator(".worth-card").count() == 2, page.text_content("[role=alert]")
    for stage in stage_names():
        page.evaluate("stage => Worth.show(stage)", stage)
    page.evaluate("Worth.show('amp')")
    assert page.evaluate(elements) == before
    assert page.evaluate("({}).hacked === undefined && Object.keys(Object.prototype).length === 0")
    card = page.locator(".worth-card").nth(1)
    for place in ("h3", "[role=tooltip]", ".worth-bar[data-n=before] .worth-name", ".worth-verdict", ".worth-of-limit"):
        assert "<script>al" in card.locator(place).first.text_content(), place
    for element in page.locator(".worth-strip a").all():
        assert re.fullmatch(r"#\w+", element.get_attribute("href"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
