"""The page in a browser: everything can be reached, read, and copied or downloaded.

Needs Chromium and playwright, which drives it; accessibility needs axe-playwright-python, which brings axe.
"""

import re
import shutil
from importlib.util import find_spec

import pytest
from playwright.sync_api import sync_playwright

from lab.programs import diffs
from lab.programs.bundle import standalone
from lab.programs.stages import BOTH
from nanoladder.config import stage_path
from nanoladder.config.stages import stage_below

pytestmark = pytest.mark.slow
SIGNS = {"ins": "+", "del": "-", "div": " "}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}, {"width": 320, "height": 800}


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}, as apt-get install chromium brings it")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visit(browser, built):
    """visit(address, viewport, **options) -> the page, open there. At the end: no error, and nothing was requested."""
    errors, requests = [], []

    def visit(address="", viewport=WIDE, **options):
        page = browser.new_context(viewport=viewport, **options).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(built.as_uri() + address)
        return page

    yield visit
    assert errors == []
    assert {url.partition("#")[0] for url in requests} == {built.as_uri()}


@pytest.fixture(scope="module")
def wide(visit):
    return visit(reduced_motion="reduce", color_scheme="light", permissions=["clipboard-read", "clipboard-write"])


@pytest.fixture
def page(wide):
    """The shared wide page, as it opens."""
    wide.evaluate("""() => { view.folded.clear(); document.activeElement.blur();
        choose({ plain: false, quiet: false }); go(0, null) }""")
    return wide


def program(stage):
    return diffs.script(stage).splitlines()


LINES = """() => [...document.querySelectorAll("#program .line:not(p), #program .hunk:not(p)")]
    .map(({tagName, className, textContent}) => [tagName.toLowerCase(), className, textContent])"""


def lines(page):
    """Lines of the program on the page, in the format of a diff."""
    return [text if kind == "hunk" else SIGNS[tag] + text for tag, kind, text in page.evaluate(LINES)]


def changed(diff):
    return [line for line in diff if line.startswith(("+", "-"))]


def at(page, hash):
    page.evaluate("hash => { location.hash = hash }", hash)
    return page


def stage_of(page):
    """The stage that the page shows, if all of its parts agree."""
    parts = page.evaluate("""() => [
        document.querySelector("#head h2").textContent,
        document.querySelector("#rail [aria-current]").textContent,
        document.querySelector(".stage:not([hidden])").id,
        document.title.split(" ")[0]]""")
    assert len(set(parts)) == 1, parts
    return parts[0]


def visible(page):
    return page.evaluate(
        "[...document.querySelectorAll('#program .line:not(p)')].filter(e => e.checkVisibility()).length"
    )


def test_every_stage_is_reached_by_link_and_shows_its_program_and_its_diff(page):
    for stage in reversed(BOTH):
        page.click(f"#rail a[href='#{stage}']")
        shown = page.locator("#program > .mechanism").all_text_contents()
        assert shown == [page.text_content(f"#{stage} .mechanism")]
        assert stage_of(page) == stage and page.url.endswith(f"#{stage}")
        shown = lines(page)
        assert [line[1:] for line in shown if line[0] != "-"] == program(stage)
        if stage_below(stage):
            diff = [re.sub(r"^@@ .* @@", "@@", line) for line in diffs.diff(stage_below(stage), stage)]
            assert changed(shown) == changed(diff)
            page.click("#plain")
            assert lines(page) == diff, stage
            if not diff:
                assert page.inner_text("#program").startswith("Both programs are the same.")
            page.click("#whole")
            inside = """() => { const [line, box] = ["#program ins, #program del", "#program"]
                .map(name => document.querySelector(name).getBoundingClientRect());
                return line.top >= box.top && line.bottom <= box.bottom }"""
            assert not diff or page.evaluate(inside), stage
    first, *_ = BOTH
    assert page.inner_text("#head strong").startswith("Against naive, all stages together: up to ")
    page.evaluate("choose({ plain: true })")  # as on a phone: the first has no diff
    assert page.is_disabled("#plain") and lines(page) == [f" {line}" for line in program(first)] and first == "naive"


def test_every_stage_is_reached_by_key_and_the_back_button_climbs_down(page):
    for stage in BOTH:
        assert stage_of(page) == stage
        page.keyboard.press("ArrowDown")
    assert stage_of(page) == BOTH[-1]  # the list ends here
    path = stage_path("low_memory_optimizer")
    at(page, "#pipeline_parallel")
    for key, steps in (("ArrowLeft", reversed(stage_path("pipeline_parallel"))), ("ArrowRight", path)):
        for stage in steps:
            assert stage_of(page) == stage
            page.keyboard.press(key)
    climbed = page.evaluate("[...document.querySelectorAll('#rail .climbed')].map((link) => link.textContent)")
    assert stage_of(page) == path[-1] and climbed == path
    at(page, "#cuda_graph")
    assert page.locator("#up a").all_inner_texts()[:2] == ["checkpointing", "ddp"]
    page.click("#up a >> nth=1")
    assert stage_of(page) == "ddp" and page.inner_text("#down") == "cuda_graph"
    at(page, "#amp")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    for stage in ("blocks", "flash", "amp"):
        page.go_back()
        assert stage_of(page) == stage
    page.go_forward()
    assert stage_of(page) == "flash"


def test_the_keyboard_is_enough(page, visit):
    page.focus("#against")
    page.keyboard.press("ArrowRight")  # is the list's own
    assert stage_of(page) == "naive"
    page.select_option("#against", "")
    page.focus("#rail [aria-current]")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == stage_of(page) == "lazy_metrics"
    fresh, reached = visit(), set()
    for n in range(90):
        fresh.keyboard.press("Tab")
        name, width = fresh.evaluate("""() => { const { id, className, tagName } = document.activeElement;
            return [id || className || tagName, getComputedStyle(document.activeElement).outlineWidth] }""")
        reached |= {name}
        assert width == "2px" or name == "BODY", name
        if n == 0:
            fresh.keyboard.press("Enter")  # skips to the program
            assert fresh.evaluate("document.activeElement.id") == "program" and stage_of(fresh) == "naive"
            fresh.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
            fresh.focus(".skip")
    assert {"theme", "machine", "beside", "whole", "against", "quiet", "copy", "program", "SUMMARY"} <= reached


def test_two_stages_are_chosen_and_compared(page):
    assert page.input_value("#against") == ""
    for address, stage, base in (
        ("#nothing", "naive", ""),
        ("#naive..amp", "amp", "naive"),
        ("#nothing..amp", "amp", ""),
    ):
        assert stage_of(at(page, address)) == stage and page.input_value("#against") == base
    at(page, "#flash")
    page.select_option("#against", "allocator")
    assert page.url.endswith("#allocator..flash")
    for a, b in (("allocator", "flash"), ("flash", "allocator"), ("compile", "naive"), ("naive", BOTH[-1])):
        shown = lines(at(page, f"#{a}..{b}"))
        assert [line[1:] for line in shown if line[0] != "-"] == program(b)
        assert [line[1:] for line in shown if line[0] != "+"] == program(a)
    at(page, "#allocator..flash")
    page.click("#up a")
    assert stage_of(page) == "blocks" and page.url.endswith("#allocator..blocks")
    page.click("#plain")
    page.select_option("#against", "blocks")
    assert page.inner_text("#program").startswith("Both programs are the same.")


def test_functions_fold(page):
    whole = visible(at(page, "#flash"))
    attend = page.locator("details[data-name='Attention.attend']")
    first = page.evaluate("program.scrollTop")
    page.click("#jump")
    assert page.evaluate("program.scrollTop") > first
    attend.locator("summary").click()
    assert whole - visible(page) == attend.locator("> .line").count() > 2
    for key in ("ArrowRight", "ArrowLeft"):  # a chosen fold stays
        page.keyboard.press(key)
        assert attend.get_attribute("open") is None
    page.click("#quiet")  # folds the others, and opens this one, which has changes
    unfolded = page.evaluate("[...document.querySelectorAll('#program details[open]')].map(e => e.dataset.name)")
    assert unfolded == ["Attention", "Attention.__init__", "Attention.attend"]
    marked = page.locator("#program ins:visible, #program del:visible").count()
    assert marked == len(changed(diffs.diff("amp", "flash")))
    assert visible(page) < whole / 2
    page.click("#quiet")
    assert visible(page) == whole


def test_the_program_can_be_copied_and_downloaded(page, tmp_path):
    at(page, "#flash")
    page.evaluate("getSelection().selectAllChildren(program)")  # a selection leaves out what was removed
    assert page.evaluate("getSelection().toString()").split() == diffs.script("flash").split()
    page.click("#quiet")  # folded code is copied, too
    page.click("#copy")
    page.locator("#status", has_text="Copied").wait_for(state="attached")
    alone = standalone("flash")  # one file that needs nothing of ours
    assert page.evaluate("navigator.clipboard.readText()") == alone
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "flash.py"
    download.value.save_as(tmp_path / "program.py")
    assert (tmp_path / "program.py").read_text(encoding="utf-8") == alone


def test_a_step_is_announced_to_a_screen_reader(page):
    at(page, "#amp")
    marks = [line[0] for line in changed(diffs.diff("tf32", "amp"))]
    announced = f"amp, 7 of {len(BOTH)}: {marks.count('+')} lines added, {marks.count('-')} removed"
    assert page.inner_text("#status") == announced


def test_the_chosen_machines_and_color_scheme_are_kept(visit, built):
    page = visit("#amp", color_scheme="light")
    shown = "[...document.querySelectorAll('#amp [data-set]')].filter(e => e.checkVisibility()).map(e => e.dataset.set)"
    first, *_, last = page.evaluate("[...machine.options].map((option) => option.value)")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    assert page.evaluate(shown) == [first]
    page.select_option("#beside", last)
    page.click("#theme")
    assert page.evaluate(ground) != light and page.get_attribute("#theme", "aria-pressed") == "true"
    dark = page.evaluate(ground)
    page.reload()
    assert page.evaluate(shown) == [first, last] and page.evaluate(ground) == dark
    page.locator("#amp .figures summary").first.click()
    assert "torch 2." in page.locator("#amp .figures p").first.inner_text()
    widths = page.evaluate("""[...document.querySelectorAll("#amp .now svg")].slice(0, 2).map((bar) =>
        [...bar.children].map((part) => part.getBoundingClientRect().width / bar.getBoundingClientRect().width))""")
    assert all(0.05 < sum(parts) < 1 and len(parts) > 2 for parts in widths)
    refusing = page.context.browser.new_page()
    refusing.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused') } })")
    refusing.goto(built.as_uri())
    refusing.select_option("#machine", last)
    assert refusing.locator("#naive [data-set]:visible").get_attribute("data-set") == last


def test_a_phone_scrolls_in_one_direction_only(visit):
    page = visit("#amp", PHONE)
    assert page.get_attribute("#plain", "aria-pressed") == "true"
    page.click("#whole")
    assert page.evaluate("program.scrollWidth <= innerWidth")
    page.set_viewport_size(NARROW)
    for stage in ("naive", "amp", "tensor_parallel"):
        assert at(page, f"#{stage}").evaluate("document.documentElement.scrollWidth <= innerWidth"), stage


def test_the_whole_program_is_printed(visit):
    page = visit("#amp", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("program.scrollHeight <= program.clientHeight")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert not page.is_visible("#rail") and page.is_visible("#amp .text") and not page.is_visible("#flash")


def test_texts_and_figures_are_visible_without_javascript(visit):
    page = visit(java_script_enabled=False)
    for stage in BOTH:
        for part in ("h2", ".text", ".cards .card"):
            assert page.locator(f"#{stage} {part}").first.is_visible(), (stage, part)
    assert not page.is_visible("#program") and not page.is_visible("#theme")


@pytest.mark.parametrize("viewport, light, stage", [(WIDE, "light", "ddp"), (PHONE, "dark", "amp")])
def test_axe_finds_no_violation(visit, viewport, light, stage):
    if find_spec("axe_playwright_python") is None:
        pytest.skip("needs axe-playwright-python: pip install axe-playwright-python")
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"#{stage}", viewport, color_scheme=light)
    page.evaluate("choose({ quiet: true })")
    page.evaluate("document.querySelectorAll('.stage[hidden]').forEach((stage) => stage.replaceChildren())")
    found = Axe().run(page)  # only of what is visible: axe is slow
    assert found.violations_count == 0, found.generate_report()
