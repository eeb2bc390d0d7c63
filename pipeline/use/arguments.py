"""What a caller in Python gave, checked before any work; messages say what was read and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.text import half_character

_SHOWN = 60


def texts_of(given: Any) -> list[str]:
    """Return `given` as a list of texts.

    Raises:
        InputError: it is something else, or one of its members is.
    """
    return [_text(item, f"texts[{place}]") for place, item in enumerate(_list(given))]


def texts_or_pairs_of(given: Any) -> list[str | tuple[str, str]]:
    """Return `given` as a list whose members are texts, or pairs of texts as tuples.

    Raises:
        InputError: it is something else, or one of its members is.
    """
    found: list[str | tuple[str, str]] = []
    for place, item in enumerate(_list(given)):
        name = f"texts[{place}]"
        if isinstance(item, tuple):
            if len(item) != 2:
                raise InputError(
                    f"{name}: expected a text or a pair of texts, read {_shown(item)}.",
                    code="not-a-pair",
                    setting=name,
                )
            found.append((_text(item[0], f"{name}[0]"), _text(item[1], f"{name}[1]")))
        else:
            found.append(_text(item, name, " A pair of texts is a tuple: (FIRST, SECOND)."))
    return found


def images_of(given: Any) -> list[Any]:
    """Return `given` as a list of images: paths as texts, or images that Pillow has opened, as they are.

    Raises:
        InputError: it is something else, or one of its members is.
    """
    from PIL.Image import Image

    if isinstance(given, str | PathLike | Image):
        raise InputError(
            "expected a list of images, read one. Put it into a list: [IMAGE].", code="not-a-list"
        )
    if isinstance(given, bytes | bytearray | Mapping | Set) or not isinstance(given, Iterable):
        raise InputError(f"expected a list of images, read {_shown(given)}.", code="not-a-list")
    found: list[Any] = []
    for place, item in enumerate(given):
        if isinstance(item, Image):
            found.append(item)
        elif isinstance(item, str | PathLike) and not isinstance(item, bytes):
            found.append(str(Path(item).expanduser().absolute()))
        else:
            raise InputError(
                f"images[{place}]: expected the path of an image file or an image of Pillow, read"
                f" {_shown(item)}. An array becomes one by PIL.Image.fromarray(ARRAY).",
                code="not-an-image",
                setting=f"images[{place}]",
            )
    return found


def count_of(given: Any, name: str) -> int:
    """Return `given`, a whole number of at least 1.

    Raises:
        InputError: it is something else.
    """
    if isinstance(given, bool) or not hasattr(given, "__index__") or (number := given.__index__()) < 1:
        raise InputError(
            f"{name}: expected a whole number of at least 1, read {_shown(given)}.",
            code="wrong-value",
            setting=name,
        )
    return int(number)


def _list(given: Any) -> list[Any]:
    if isinstance(given, str):
        raise InputError(
            "expected a list of texts, read one text. Put it into a list: [TEXT].", code="not-a-list"
        )
    if isinstance(given, bytes | bytearray | Mapping | Set) or not isinstance(given, Iterable):
        raise InputError(f"expected a list of texts, read {_shown(given)}.", code="not-a-list")
    return list(given)


def _text(item: Any, name: str, more: str = "") -> str:
    if isinstance(item, bytes | bytearray):
        raise InputError(
            f"{name}: expected a text, read {_shown(item)}. Decode it first: .decode('utf-8').",
            code="not-a-text",
            setting=name,
        )
    if not isinstance(item, str):
        pair = not more and isinstance(item, tuple)
        more = more or " Pairs of texts are for predict." * pair
        code = "pairs-not-taken" if pair else "not-a-text"
        raise InputError(f"{name}: expected a text, read {_shown(item)}.{more}", code=code, setting=name)
    if (half := half_character(item)) is not None:
        raise InputError(
            f"{name}: holds {half!r}, half of a surrogate pair, which is no character.",
            code="lone-surrogate",
            setting=name,
        )
    return str(item)  # numpy has a kind of its own


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"
