"""What a model's folder says of its licence: the front matter of its model card, or a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

_CARD = "README.md"
_FILES = re.compile(r"(licen[sc]e|copying)(\.(txt|md|rst))?", re.IGNORECASE)
_MOST = 1_000_000  # bytes that are looked at
_LONGEST = 100


def licence_of(folder: Path) -> str | None:
    """Return in one line what the model in `folder` says of its licence; None where it says nothing."""
    return _of_card(folder / _CARD) or _of_file(folder)


def _of_card(path: Path) -> str | None:
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
    return _line(f"{', '.join(words)} (its model card)") if words else None


def _of_file(folder: Path) -> str | None:
    """Return the first words of a licence file, which are its name."""
    try:
        names = sorted(path for path in folder.iterdir() if _FILES.fullmatch(path.name) and path.is_file())
    except OSError:
        return None
    for path in names:
        first = next((line.strip(" #*\t") for line in _read(path).splitlines() if line.strip()), "")
        if first:
            return _line(f"{first} (its file {path.name})")
    return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_MOST).decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError:
        return ""


def _line(text: str) -> str:
    """Return `text` in one line that is not long; what a stranger wrote may hold anything."""
    short = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return short if len(short) <= _LONGEST else short[: _LONGEST - 3] + "..."
