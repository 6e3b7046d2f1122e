"""A headless browser for tests of the page. Not a test module."""

import contextlib

import pytest

from lab.page import picture
from nanoladder.errors import BadInput


@contextlib.contextmanager
def chromium():
    """A Playwright Browser, closed at the end; skips the test if Playwright or a browser is missing."""
    with contextlib.ExitStack() as opened:
        try:
            browser = opened.enter_context(picture.chromium())
        except BadInput as error:
            pytest.skip(str(error))
        yield browser
