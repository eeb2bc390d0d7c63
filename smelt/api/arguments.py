"""Validate the arguments of Python calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.text import find_lone_surrogate

_MAX_SHOWN = 60


def as_texts(value: Any) -> list[str]:
    """Return `value` as a list of strings.

    Raises:
        InputError: it is not an iterable of strings.
    """
    return [_as_text(item, f"texts[{place}]") for place, item in enumerate(_as_list(value))]


def as_texts_or_pairs(value: Any) -> list[str | tuple[str, str]]:
    """Return `value` as a list of strings, or of pairs of strings as tuples.

    Raises:
        InputError: it is not an iterable of strings or pairs.
    """
    found: list[str | tuple[str, str]] = []
    for place, item in enumerate(_as_list(value)):
        name = f"texts[{place}]"
        if isinstance(item, tuple):
            if len(item) != 2:
                raise InputError(
                    f"{name}: expected a text or a pair of texts, got {_shown_value(item)}.",
                    code="not-a-pair",
                    setting=name,
                )
            found.append((_as_text(item[0], f"{name}[0]"), _as_text(item[1], f"{name}[1]")))
        else:
            found.append(_as_text(item, name, " A pair of texts is a tuple: (FIRST, SECOND)."))
    return found


def as_images(value: Any) -> list[Any]:
    """Return `value` as a list of images: absolute paths as strings, Pillow images unchanged.

    Raises:
        InputError: it is not an iterable of paths or Pillow images.
    """
    from PIL.Image import Image

    if isinstance(value, str | PathLike | Image):
        raise InputError("expected a list of images, got one. Put it in a list: [IMAGE].", code="not-a-list")
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise InputError(f"expected a list of images, got {_shown_value(value)}.", code="not-a-list")
    found: list[Any] = []
    for place, item in enumerate(value):
        if isinstance(item, Image):
            found.append(item)
        elif isinstance(item, str | PathLike) and not isinstance(item, bytes):
            found.append(str(Path(item).expanduser().absolute()))
        else:
            raise InputError(
                f"images[{place}]: expected the path of an image file or a Pillow image, got"
                f" {_shown_value(item)}. Convert an array with PIL.Image.fromarray(ARRAY).",
                code="not-an-image",
                setting=f"images[{place}]",
            )
    return found


def as_count(value: Any, name: str) -> int:
    """Return `value` as an integer of at least 1.

    Raises:
        InputError: it is not such a number.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or (number := value.__index__()) < 1:
        raise InputError(
            f"{name}: expected an integer of at least 1, got {_shown_value(value)}.",
            code="wrong-value",
            setting=name,
        )
    return int(number)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        raise InputError(
            "expected a list of texts, got one text. Put it in a list: [TEXT].", code="not-a-list"
        )
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise InputError(f"expected a list of texts, got {_shown_value(value)}.", code="not-a-list")
    return list(value)


def _as_text(item: Any, name: str, more: str = "") -> str:
    if isinstance(item, bytes | bytearray):
        raise InputError(
            f"{name}: expected a text, got {_shown_value(item)}. Decode it first: .decode('utf-8').",
            code="not-a-text",
            setting=name,
        )
    if not isinstance(item, str):
        pair = not more and isinstance(item, tuple)
        more = more or " Pairs of texts are for predict." * pair
        code = "pairs-not-taken" if pair else "not-a-text"
        raise InputError(f"{name}: expected a text, got {_shown_value(item)}.{more}", code=code, setting=name)
    if (half := find_lone_surrogate(item)) is not None:
        raise InputError(
            f"{name}: contains {half!r}, a lone surrogate, which is not a valid character. Remove it.",
            code="lone-surrogate",
            setting=name,
        )
    return str(item)  # numpy has its own string type


def _shown_value(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"
