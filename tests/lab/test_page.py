"""docs/ladder.html holds what ladder.py prints; in a browser all of it is reached, read and taken along.

The tests in a browser need Chromium and playwright; those of accessibility axe-playwright-python, which brings axe.
"""

import json
import re
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import pairwise, permutations
from types import SimpleNamespace

import pytest
from browser import chromium

from lab import pages, show
from lab.page import build, picture, programs
from nanoladder.config import stage_names
from nanoladder.errors import BadInput

STAGES = stage_names()
STEPS = list(pairwise(STAGES))
SIGNS = {"ins": "+", "del": "-", "div": " "}
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


class Articles(HTMLParser):
    """Reads the page: the ids, the attributes that load something, and the static lines of each stage."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.loads, self.lines, self.open = [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.loads += [tag for name in ("src", "srcset", "data", "style") if name in attributes]
        self.loads += [tag] if tag in ("link", "img", "iframe", "object", "embed") else []
        if tag == "article":
            self.stage = self.lines.setdefault(attributes["id"], [])
        if tag in SIGNS and attributes.get("class") in ("line", "hunk"):
            self.open = tag
            self.stage.append(SIGNS[tag] if attributes["class"] == "line" else "")

    def handle_data(self, data):
        if self.open:
            self.stage[-1] += data

    def handle_endtag(self, tag):
        self.open = None if tag == self.open else self.open


@pytest.fixture(scope="module")
def text():
    return build.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def articles(text):
    return Articles(text)


@pytest.mark.slow
def test_the_page_is_that_of_this_code(text):
    """If it is not: python ladder.py html."""
    assert text == build.page()


def test_html_writes_the_page(run_main, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "PAGE", tmp_path / "docs" / "ladder.html")
    monkeypatch.setattr(build, "page", lambda: "<p>naïve")
    assert run_main(show.main, "html").code == 0
    assert build.PAGE.read_text(encoding="utf-8") == "<p>naïve"


def test_the_page_is_small_and_loads_nothing(text, articles):
    assert len(text.encode()) < 1_500_000
    assert articles.loads == []
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon", text)


def test_every_stage_has_an_address_and_no_id_stands_twice(articles):
    assert list(articles.lines) == STAGES
    assert len(set(articles.ids)) == len(articles.ids)


def test_the_rail_groups_stages_that_follow_each_other(text):
    groups = [build.group(stage) for stage in STAGES]
    assert [name for n, name in enumerate(groups) if name != groups[n - 1] or n == 0] == list(build.GROUPS)
    assert build.group("chunked_loss") == "speed" and build.group("checkpointing") == "memory"
    assert text.count("<li class=group>") == len(build.GROUPS)


@pytest.mark.parametrize("before, stage", STEPS)
def test_without_script_a_stage_shows_its_diff(articles, before, stage):
    assert articles.lines[stage] == list(pages.diff(before, stage))


def test_without_script_the_first_stage_shows_its_program(articles):
    assert articles.lines["naive"] == [f" {line}" for line in pages.script("naive").splitlines()]


def test_pygments_keeps_every_character():
    for name in ("naive", STAGES[-1]):
        lines = [re.sub(r"<[^>]*>", "", line) for line in programs.highlight(name)]
        plain = [line.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for line in lines]
        assert plain == pages.script(name).splitlines()


def test_parts_are_named_as_in_diffs():
    source = "import a\n\nclass A:\n    def f(self):\n        def g():\n            pass\n\n\n@a\ndef h():\n    pass\n"
    assert programs.parts(source) == [["A", 3, 6], ["A.f", 4, 6], ["A.f.g", 5, 6], ["h", 10, 11]]


def test_embedded_json_cannot_end_its_element():
    value = {"</script><script>alert(1)": ["<!--", "é"]}
    assert "<" not in build.embedded(value) and json.loads(build.embedded(value)) == value


def test_texts_are_escaped():
    found = build.text("a < b, `x & y`\n\n**Why:** c > d\n\n**Source:**\n- [<b>](https://a.b/?c&d)")
    assert "<p>a &lt; b, <code>x &amp; y</code></p>" in found and "<dd>c &gt; d</dd>" in found
    assert '<a href="https://a.b/?c&amp;d" rel=noreferrer>&lt;b&gt;</a>' in found


def test_without_pygments_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygments.token", None)
    with pytest.raises(BadInput, match="pip install Pygments"):
        programs.kinds()


# -- in a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """visit(address, viewport, **options) -> the page, open there. At the end: no error, and nothing was requested."""
    opened, errors, requests = [], [], []

    def visit(address="", viewport=WIDE, **options):
        context = browser.new_context(viewport=viewport, **options)
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(build.PAGE.as_uri() + address)
        return page

    visit.errors = errors
    yield visit
    for context in opened:
        context.close()
    assert errors == []
    assert {url.partition("#")[0] for url in requests} <= {build.PAGE.as_uri()}


LINES = """() => [...document.querySelectorAll("#program > .line, #program > .hunk")]
    .map(({tagName, className, textContent}) => [tagName.toLowerCase(), className.split(" ")[0], textContent])"""


def lines(page):
    """Lines of the program on the page, as a diff has them."""
    return [text if kind == "hunk" else SIGNS[tag] + text for tag, kind, text in page.evaluate(LINES)]


def changed(diff):
    return [line for line in diff if line[0] in "+-"]


def stage_of(page):
    """The stage that the page shows, if all of its parts agree."""
    parts = page.evaluate("""() => [
        document.querySelector("#head h2").textContent,
        document.querySelector("#rail [aria-current]").textContent,
        document.querySelector(".stage:not([hidden])").id,
        document.title.split(" ")[0]]""")
    assert len(set(parts)) == 1, parts
    return parts[0]


def test_every_stage_is_reached_by_key(visit):
    page = visit()
    for n, stage in enumerate(STAGES):
        assert stage_of(page) == stage
        assert page.url.endswith(f"#{stage}") or n == 0
        page.keyboard.press("ArrowRight" if n % 2 else "ArrowDown")
    assert stage_of(page) == STAGES[-1]  # the ladder ends here
    page.keyboard.press("ArrowLeft")
    assert stage_of(page) == STAGES[-2]


def test_every_stage_is_reached_by_link_and_by_address(visit):
    page = visit()
    for stage in reversed(STAGES):
        page.click(f"#rail a[href='#{stage}']")
        assert stage_of(page) == stage and page.url.endswith(f"#{stage}")
    for stage in STAGES:
        page.evaluate("hash => { location.hash = hash }", stage)
        assert stage_of(page) == stage


def test_the_back_button_climbs_down(visit):
    page = visit("#amp")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    for stage in ("fused_adamw", "flash", "amp"):
        page.go_back()
        assert stage_of(page) == stage
    page.go_forward()
    assert stage_of(page) == "flash"


@pytest.mark.parametrize("address, stage", [("#nothing", "naive"), ("#naive..amp", "amp"), ("#nothing..amp", "amp")])
def test_an_address_names_a_stage_or_two(visit, address, stage):
    page = visit(address)
    assert stage_of(page) == stage
    assert page.input_value("#base") == ("naive" if "naive" in address else "")


def test_a_stage_shows_its_whole_program_with_the_changed_lines_marked(visit):
    page = visit()
    for before, stage in STEPS[5:7]:
        page.evaluate("hash => { location.hash = hash }", stage)
        shown = lines(page)
        assert [line[1:] for line in shown if line[0] != "-"] == pages.script(stage).splitlines()
        assert changed(shown) == changed(pages.diff(before, stage))


def test_a_step_shows_the_first_change(visit):
    page = visit("#flash")
    for stage in ("amp", "chunked_loss"):
        page.click(f"#rail a[href='#{stage}']")
        inside = """() => { const [line, box] = ["#program > ins, #program > del", "#program"]
            .map(name => document.querySelector(name).getBoundingClientRect());
            return line.top >= box.top && line.bottom <= box.bottom }"""
        assert page.evaluate(inside)
    first = page.evaluate("document.querySelector('#program').scrollTop")
    page.emulate_media(reduced_motion="reduce")
    page.click("#jump")
    assert page.evaluate("document.querySelector('#program').scrollTop") > first


@pytest.mark.slow
def test_the_diff_of_any_two_stages_is_that_of_ladder_py(visit):
    page = visit()
    page.click("#plain")
    for a, b in list(permutations(STAGES, 2))[::7]:
        page.evaluate("hash => { location.hash = hash }", f"{a}..{b}")
        assert lines(page) == list(pages.diff(a, b)), (a, b)


def test_two_stages_are_chosen_and_compared(visit):
    page = visit("#flash")
    page.select_option("#base", "allocator")
    page.click("#plain")
    assert page.url.endswith("#allocator..flash")
    assert lines(page) == list(pages.diff("allocator", "flash"))
    page.click("#up")
    assert stage_of(page) == "fused_adamw" and page.url.endswith("#allocator..fused_adamw")
    page.select_option("#base", "")
    assert lines(page) == list(pages.diff("flash", "fused_adamw"))
    page.select_option("#base", "fused_adamw")
    assert page.inner_text("#program") == "Both programs are the same."


def visible(page):
    return page.evaluate(
        "[...document.querySelectorAll('#program > .line')].filter(e => !e.hidden).map(e => e.innerText)"
    )


def test_functions_fold(visit):
    page = visit("#flash")
    whole = visible(page)
    page.click("[aria-label^='Attention.attend,']")
    folded = visible(page)
    assert len(whole) - len(folded) == 5  # two lines, and three ghosts
    assert page.get_attribute("[aria-label^='Attention.attend,']", "aria-expanded") == "false"
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Attention.attend,")
    page.keyboard.press("ArrowRight")  # a chosen fold stays
    assert page.get_attribute("[aria-label^='Attention.attend,']", "aria-expanded") == "false"
    page.keyboard.press("ArrowLeft")
    page.click("#quiet")  # folds the others, and opens this one, which has changes
    unfolded = page.evaluate("[...document.querySelectorAll('.fold[aria-expanded=true]')].map(e => e.ariaLabel)")
    assert [label.partition(",")[0] for label in unfolded] == ["Attention", "Attention.__init__", "Attention.attend"]
    assert set(changed(pages.diff("amp", "flash"))) <= set(lines(page))
    assert len(visible(page)) < len(whole) / 2
    page.click("#quiet")
    assert visible(page) == whole


@pytest.mark.parametrize("stage", ["naive", "flash"])
def test_the_program_is_taken_along(visit, tmp_path, stage):
    page = visit(f"#{stage}", permissions=["clipboard-read", "clipboard-write"])
    page.click("#quiet")  # what is folded is taken along, too
    page.click("#copy")
    page.wait_for_function("document.querySelector('#copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == pages.script(stage)
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == f"{stage}.py"
    download.value.save_as(tmp_path / "program.py")
    assert (tmp_path / "program.py").read_text(encoding="utf-8") == pages.script(stage)


def test_a_selection_leaves_out_what_was_removed(visit):
    page = visit("#flash")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#program'))")
    selected = page.evaluate("getSelection().toString()")
    assert [line for line in selected.splitlines() if line] == list(filter(None, pages.script("flash").splitlines()))


def test_the_keyboard_is_enough(visit):
    page = visit()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skips to the program
    assert page.evaluate("document.activeElement.id") == "program" and stage_of(page) == "set_to_none"
    reached = set()
    page = visit()
    page.keyboard.press("ArrowRight")
    for _ in range(80):
        page.keyboard.press("Tab")
        name, width = page.evaluate("""() => { const { id, className, tagName } = document.activeElement;
            return [id || className || tagName, getComputedStyle(document.activeElement).outlineWidth] }""")
        reached |= {name}
        assert width == "2px" or name == "BODY", name
    assert {"theme", "whole", "plain", "base", "jump", "quiet", "fold", "copy", "download", "program"} <= reached
    page.focus("#rail [aria-current]")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == stage_of(page) == "lazy_metrics"
    page.focus("#base")
    page.keyboard.press("ArrowRight")  # is the list's own
    assert stage_of(page) == "lazy_metrics"


def test_a_step_is_said_to_a_screen_reader(visit):
    page = visit("#tf32")
    page.keyboard.press("ArrowRight")
    marks = [line[0] for line in changed(pages.diff("tf32", "amp"))]
    said = f"amp, stage 7 of 20: {marks.count('+')} lines added, {marks.count('-')} removed"
    assert page.inner_text("#said") == said


@pytest.mark.slow
@pytest.mark.parametrize("light", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_no_violation(visit, light, viewport):
    if find_spec("axe_playwright_python") is None:
        pytest.skip("needs axe-playwright-python: pip install axe-playwright-python")
    from axe_playwright_python.sync_playwright import Axe

    page = visit("#amp", viewport, color_scheme=light, bypass_csp=True)
    for button in ("#plain", "#whole"):
        page.click(button)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_the_light_is_chosen_and_kept(visit):
    page = visit(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    dark = page.evaluate(ground)
    assert dark != light and page.get_attribute("#theme", "aria-pressed") == "true"
    page.reload()
    assert page.evaluate(ground) == dark


def test_a_phone_scrolls_in_one_direction_only(visit):
    page = visit("#amp", PHONE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.get_attribute("#plain", "aria-pressed") == "true"
    page.click("#whole")
    assert page.evaluate("document.querySelector('#program').scrollWidth <= innerWidth")


def test_on_paper_the_whole_program_is_there(visit):
    page = visit("#amp", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(
        "document.querySelector('#program').scrollHeight <= document.querySelector('#program').clientHeight"
    )
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert not page.is_visible("#rail") and page.is_visible("#amp .text") and not page.is_visible("#flash")


def test_without_script_texts_and_diffs_are_read(visit):
    page = visit(java_script_enabled=False)
    for stage in STAGES:
        assert page.is_visible(f"#{stage} h2") and page.is_visible(f"#{stage} .text")
        assert page.is_visible(f"#{stage} .code .line")
    assert not page.is_visible("#program") and not page.is_visible("#theme")


def test_foreign_code_does_not_run(visit):
    page = visit()
    page.evaluate("""() => { const script = document.createElement("script");
        script.textContent = "window.ran = true"; document.body.append(script) }""")
    assert page.evaluate("window.ran") is None
    assert "Content Security Policy" in visit.errors.pop()


# -- the picture of it


def test_the_picture_is_small(browser, run_main, monkeypatch, tmp_path):
    monkeypatch.setattr(picture, "chromium", lambda: nullcontext(browser))
    monkeypatch.setattr(picture, "PICTURE", tmp_path / "page.png")
    assert run_main(picture.main).code == 0
    assert 20_000 < picture.PICTURE.stat().st_size < 200_000


@pytest.mark.parametrize("missing", ["playwright", "browser"])
def test_without_a_browser_one_line_says_what_to_install(refused, monkeypatch, missing):
    if missing == "playwright":
        monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    else:
        monkeypatch.setitem(sys.modules, "playwright.sync_api", SimpleNamespace(sync_playwright=None))
        monkeypatch.setattr("shutil.which", lambda name: None)
    answer = {"playwright": "pip install playwright", "browser": "apt-get install chromium"}[missing]
    assert answer in refused(picture.main)
