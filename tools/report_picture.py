"""Draw the picture of a report in README.md from the report of an idle run of the quickstart.

`make docs` renders docs/images/report.json.gz in a headless Chromium, if the top of the page changed since
docs/images/report.png was drawn: the PNG's text `page` is the SHA-256 of the HTML before the table of steps.
For another run: `python -m tools.report_picture RUN/report.json`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from smelt.evaluate.report.render import render_html

IMAGES = Path(__file__).parent.parent / "docs" / "images"
REPORT, PICTURE = IMAGES / "report.json.gz", IMAGES / "report.png"
WIDTH, HEIGHT = 1200, 1180
"""Size in pixels: the verdict and the scores on test."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def read_report() -> dict[str, Any]:
    """Return the kept report."""
    report: dict[str, Any] = json.loads(gzip.decompress(REPORT.read_bytes()))
    return report


def page_digest(page: str) -> str:
    """Return the SHA-256 of the HTML before the table of steps, which the picture does not show."""
    shown = page[: page.index('<section aria-labelledby="steps">')]
    return hashlib.sha256(shown.encode()).hexdigest()


def pictured_digest() -> str | None:
    """Return the digest of the page that the picture shows; None without a picture."""
    if not PICTURE.is_file():
        return None
    with Image.open(PICTURE) as picture:
        digest = picture.info.get("page")
    return digest if isinstance(digest, str) else None


def draw(page: str) -> None:
    """Write the picture of a page.

    Raises:
        FileNotFoundError: no Chromium or Chrome in PATH.
        subprocess.CalledProcessError: the browser failed.
    """
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError(f"{PICTURE} is drawn by Chromium or Chrome, and neither is in PATH.")
    with tempfile.TemporaryDirectory() as folder:
        html, shot = Path(folder, "report.html"), Path(folder, "report.png")
        html.write_text(page, encoding="utf-8")
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={shot}",
                html.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        note = PngInfo()
        note.add_text("page", page_digest(page))
        with Image.open(shot) as picture:
            picture.save(PICTURE, pnginfo=note, optimize=True)


def main(arguments: list[str]) -> None:
    """Keep the report of another run, if one is named, and draw the picture again if its page changed."""
    if arguments:
        text = Path(arguments[0]).read_bytes()
        REPORT.write_bytes(gzip.compress(text, mtime=0))
    page = render_html(read_report())
    if pictured_digest() != page_digest(page):
        draw(page)


if __name__ == "__main__":
    main(sys.argv[1:])
