"""Takes the picture of docs/ladder.html that the README shows: python -m lab.page.picture

Needs Chromium, playwright, which drives it, and Pillow, which comes with matplotlib.
"""

import contextlib
import io
import os
import shutil
import sys
from nanoladder.entry import run_script

from PIL import Image
from playwright.sync_api import sync_playwright

from lab.page.build import PAGE
from nanoladder import files
from nanoladder.errors import BadInput

PICTURE = PAGE.with_name("ladder-page.png")
STAGE = "amp"
SIZE = {"width": 1440, "height": 900}
COLORS = 128  # of the picture: with more its file would be larger
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--disable-background-networking"]
if sys.platform == "linux" and os.geteuid() == 0:
    FLAGS.append("--no-sandbox")  # root, as in a container, has none


@contextlib.contextmanager
def chromium():
    """Yields a headless Chromium as a Playwright Browser. Raises BadInput if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise BadInput(f"found no browser: expected {', '.join(NAMES)}, as apt-get install chromium brings it")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def main(_):
    with chromium() as browser:
        page = browser.new_page(viewport=SIZE, device_scale_factor=1.5, color_scheme="light", reduced_motion="reduce")
        page.goto(f"{PAGE.as_uri()}#{STAGE}")
        page.click("#quiet")
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        image = Image.open(io.BytesIO(page.screenshot()))
    small = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    files.write(PICTURE, lambda file: small.save(file, format="PNG", optimize=True))


if __name__ == "__main__":
    run_script(main)
