"""Figures drawn with matplotlib as SVG for a page, and as SVG and PNG files.

On the page their colors are the page's CSS variables, so they follow the light and the dark theme. Their
texts remain texts, so they have the browser's font, and names can be found and copied.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from types import ModuleType
from typing import Any

from smelt.core.messages import escape_controls

FILE_DPI = 216  # of a PNG: three times the size on the page, for slides

PALETTES = {
    "light": {
        "card": "#ffffff", "ink": "#1b2330", "soft": "#5b6675", "line": "#dfe3e9", "accent": "#0b6bcb",
        "torch": "#5b6ee1", "onnx": "#0f9d8a", "tensorrt": "#c2570c", "good": "#117a45", "bad": "#b3261e",
    },
    "dark": {
        "card": "#1a2028", "ink": "#e6eaf0", "soft": "#9aa6b5", "line": "#2d3641", "accent": "#6bb1ff",
        "torch": "#93a1ff", "onnx": "#3fd0bb", "tensorrt": "#ff9d5c", "good": "#5fd394", "bad": "#ff8f86",
    },
}  # fmt: skip
"""The colors of figures by theme; pages have the same, as CSS variables."""

_RUN_COLORS = {
    "light": ("#0b6bcb", "#c2570c", "#0f9d8a", "#a3329e", "#8a6d00", "#b3261e", "#4a7d1a", "#5b6675"),
    "dark": ("#6bb1ff", "#ff9d5c", "#3fd0bb", "#e68be2", "#e0c050", "#ff8f86", "#a5d76e", "#9aa6b5"),
}
NUM_RUN_COLORS = len(_RUN_COLORS["light"])
RUN_PALETTES = {
    theme: colors | {f"run{at}": color for at, color in enumerate(_RUN_COLORS[theme])}
    for theme, colors in PALETTES.items()
}
"""`PALETTES` with the colors `run0`, `run1` and so on of compared runs."""

# stand for the variables while matplotlib draws, which accepts colors only
_PLACEHOLDERS = {name: f"#fedc{number:02x}" for number, name in enumerate(RUN_PALETTES["light"])}

Draw = Callable[[Mapping[str, str]], Any]
"""Draws a matplotlib Figure at 72 dots per inch with the given colors by name."""


@dataclass(frozen=True)
class PageFigure:
    """A figure on a page.

    draw: draws it. css_class: of its SVG element. width, height: in points, which are CSS pixels. label:
    describes it to screen readers. titles: tooltips, by the `gid` of matplotlib's artists.
    """

    draw: Draw
    css_class: str
    width: int
    height: int
    label: str
    titles: Mapping[str, str]


def css_colors(theme: str, palettes: Mapping[str, Mapping[str, str]] = PALETTES) -> str:
    """Return the colors of a theme as CSS variables."""
    return " ".join(f"--{name}: {color};" for name, color in palettes[theme].items())


def page_svg(figure: PageFigure) -> str:
    """Return a figure as an SVG element of a page.

    It has no ids, links to elsewhere and styles that could affect the rest of the page.
    """
    text = figure_bytes(figure.draw, _PLACEHOLDERS, "svg", figure.css_class).decode()
    text = _recolor(text, {name: f"var(--{name})" for name in _PLACEHOLDERS})
    text = re.sub(
        r"^.*?<svg[^>]*>|<style.*?</style>| font-family: [^;]*;|<g id=[^>]*/>", "", text, flags=re.DOTALL
    )
    text = re.sub(r"\s*\n\s*", " ", text).replace("xlink:href", "href")
    titles = {gid: f"<title>{escape(escape_controls(title))}</title>" for gid, title in figure.titles.items()}
    text = re.sub(r'<g id="([^"]*)">', lambda match: "<g>" + titles.get(match[1], ""), text)
    return (
        f'<svg class="{figure.css_class}" viewBox="0 0 {figure.width} {figure.height}" role="img"'
        f' aria-label="{escape(escape_controls(figure.label))}">{text}'
    )


def theme_files(stem: str) -> dict[str, tuple[str, str]]:
    """Return (theme, format) of the files of a figure by name: SVG and PNG, light and dark."""
    return {
        f"{stem}{'-dark' * (theme == 'dark')}.{kind}": (theme, kind)
        for theme in PALETTES
        for kind in ("svg", "png")
    }


def draw_theme_files(draw: Draw, stem: str) -> dict[str, bytes]:
    """Return the content of `theme_files`; the SVG is drawn once for both themes."""
    svg = figure_bytes(draw, _PLACEHOLDERS, "svg").decode()
    return {
        name: _recolor(svg, PALETTES[theme]).encode()
        if kind == "svg"
        else figure_bytes(draw, PALETTES[theme], kind)
        for name, (theme, kind) in theme_files(stem).items()
    }


def _recolor(svg: str, colors: Mapping[str, str]) -> str:
    """Return a drawing with its placeholders replaced."""
    for name, color in colors.items():
        svg = svg.replace(_PLACEHOLDERS[name], color)
    return svg


def figure_bytes(draw: Draw, colors: Mapping[str, str], kind: str, salt: str = "file") -> bytes:
    """Return a figure as a file of format `kind`, svg or png; equal figures give equal files."""
    matplotlib = _import_matplotlib()
    out = io.BytesIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.size": 12,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font of the PNG does not have
        figure = draw(colors)
        for artist in figure.findobj(lambda artist: hasattr(artist, "set_clip_on")):
            artist.set_clip_on(False)  # nothing reaches beyond the axes, and clip paths need links
        unsigned = {"Date": None, "Creator": None, "Format": None, "Type": None}
        metadata = unsigned if kind == "svg" else {"Software": None}
        figure.savefig(out, format=kind, dpi=72 if kind == "svg" else FILE_DPI, metadata=metadata)
    return out.getvalue()


def _import_matplotlib() -> ModuleType:
    """Return matplotlib, imported even if `MPLBACKEND` names a backend that is not installed.

    Jupyter sets the variable for all processes, but the backend may exist in its environment only. Figures
    are saved to files here, which needs no backend; a program that draws windows keeps its valid one.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports that it caches fonts
    is_first_import = "matplotlib" not in sys.modules
    backend = os.environ.pop("MPLBACKEND", None) if is_first_import else None
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
    return matplotlib


def new_figure(width: int, height: int, colors: Mapping[str, str]) -> Any:
    """Return an empty matplotlib Figure; sizes in points."""
    from matplotlib.figure import Figure

    return Figure((width / 72, height / 72), dpi=72, facecolor=colors["card"])


def style_axes(axes: Any, colors: Mapping[str, str]) -> None:
    """Set the grid, the colors of the ticks, and no frame."""
    axes.tick_params(length=0, labelsize=12, labelcolor=colors["soft"])
    axes.grid(color=colors["line"], linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def shorten(name: str, letters: int) -> str:
    """Return a name with control characters escaped, cut to `letters`."""
    name = escape_controls(name)
    return name if len(name) <= letters else name[: letters - 1] + "…"
