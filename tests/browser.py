"""A headless browser for tests of the page. Not a test module."""

import contextlib
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-background-networking"]


@contextlib.contextmanager
def chromium():
    """A Playwright Browser, closed at the end; skips the test if Playwright or a browser is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: one of {', '.join(NAMES)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()
