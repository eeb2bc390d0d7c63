"""The licence of a model: from the front matter of its model card, or from a licence file."""

from __future__ import annotations

import re
from pathlib import Path

_CARD = "README.md"
_FILES = re.compile(r"(licen[sc]e|copying)(\.(txt|md|rst))?", re.IGNORECASE)
_MAX_BYTES = 1_000_000  # bytes that are read
_MAX_LINE_LENGTH = 100


def read_licence(folder: Path) -> str | None:
    """Return the licence of the model in `folder` in one line; None where it is not stated."""
    return _licence_from_card(folder / _CARD) or _licence_from_file(folder)


def _licence_from_card(path: Path) -> str | None:
    """Return the `license` of a model card, with its name or link where it is `other`."""
    front = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", _read(path), flags=re.S)
    if front is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(front[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    values = values if isinstance(values, dict) else {}
    said = [values.get(key) for key in ("license", "license_name", "license_link")]
    words = [str(w) for one in said if one for w in (one if isinstance(one, list) else [one])]
    return _single_line(f"{', '.join(words)} (its model card)") if words else None


def _licence_from_file(folder: Path) -> str | None:
    """Return the first words of a licence file, which are its name."""
    try:
        names = sorted(path for path in folder.iterdir() if _FILES.fullmatch(path.name) and path.is_file())
    except OSError:
        return None
    for path in names:
        first = next((line.strip(" #*\t") for line in _read(path).splitlines() if line.strip()), "")
        if first:
            return _single_line(f"{first} (its file {path.name})")
    return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError:
        return ""


def _single_line(text: str) -> str:
    """Return `text` in one line of limited length; it is untrusted."""
    short = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return short if len(short) <= _MAX_LINE_LENGTH else short[: _MAX_LINE_LENGTH - 3] + "..."
