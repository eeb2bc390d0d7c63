"""Checks of the arguments of Python calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.messages import find_lone_surrogate

if TYPE_CHECKING:
    pass


_MAX_SHOWN = 60


def as_texts(value: Any) -> list[str]:
    """Return `value` as a list of strings.

    Raises:
        InputError: it is not an iterable of strings.
    """
    return [as_text(item, f"texts[{index}]") for index, item in enumerate(as_list(value))]


def as_texts_or_pairs(value: Any) -> list[str | tuple[str, str]]:
    """Return `value` as a list of strings, or of pairs of strings as tuples.

    Raises:
        InputError: it is not an iterable of strings or pairs.
    """
    converted: list[str | tuple[str, str]] = []
    for index, item in enumerate(as_list(value)):
        name = f"texts[{index}]"
        if isinstance(item, tuple):
            if len(item) != 2:
                raise InputError(
                    f"{name}: expected a text or a pair of texts, got {_shown_value(item)}.",
                    code="not-a-pair",
                    setting=name,
                )
            converted.append((as_text(item[0], f"{name}[0]"), as_text(item[1], f"{name}[1]")))
        else:
            converted.append(as_text(item, name, " A pair of texts is a tuple: (FIRST, SECOND)."))
    return converted


def as_paths(value: Any) -> list[str]:
    """Return `value` as a list of absolute paths.

    Raises:
        InputError: it is not an iterable of paths.
    """
    if isinstance(value, str | PathLike | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise InputError(f"expected a list of paths, got {_shown_value(value)}.", code="not-a-list")
    paths: list[str] = []
    for index, item in enumerate(value):
        if not isinstance(item, str | PathLike) or isinstance(item, bytes):
            raise InputError(
                f"audio[{index}]: expected the path of a file, got {_shown_value(item)}.", code="not-a-file"
            )
        paths.append(str(Path(item).expanduser().absolute()))
    return paths


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
    converted: list[Any] = []
    for index, item in enumerate(value):
        if isinstance(item, Image):
            converted.append(item)
        elif isinstance(item, str | PathLike) and not isinstance(item, bytes):
            converted.append(str(Path(item).expanduser().absolute()))
        else:
            raise InputError(
                f"images[{index}]: expected the path of an image file or a Pillow image, got"
                f" {_shown_value(item)}. Convert an array with PIL.Image.fromarray(ARRAY).",
                code="not-an-image",
                setting=f"images[{index}]",
            )
    return converted


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


def as_list(value: Any) -> list[Any]:
    """Return the items of `value`.

    Raises:
        InputError: it is a string, or not an iterable.
    """
    if isinstance(value, str):
        raise InputError(
            "expected a list of texts, got one text. Put it in a list: [TEXT].", code="not-a-list"
        )
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise InputError(f"expected a list of texts, got {_shown_value(value)}.", code="not-a-list")
    return list(value)


def as_text(item: Any, name: str, more: str = "") -> str:
    """Return `item`, a string that UTF-8 can encode. name: of the argument. more: appended to the message.

    Raises:
        InputError: it is none.
    """
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
