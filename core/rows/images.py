"""Rows that are images: a file of rows that names image files, a folder of classes, or an archive of JPEGs.

What a row holds is a reference: the path of an image file, or `ARCHIVE.npz#N` for the image N (from 0) of an
archive. Whoever wants pixels asks for the bytes behind it; nothing here decodes more than a header.

An archive is an `.npz` file with `jpeg` (uint8, the bytes of all images one after another), `offsets` (int64
[n + 1]: image i is jpeg[offsets[i]:offsets[i + 1]]) and `label` ([n], integers or names).
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, nearest
from smelt.core.rows.colours import require_range
from smelt.core.rows.reading import Rows, read_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARCHIVE = ".npz"
# Others that Pillow knows start programs (EPS), or are of containers that nobody classifies.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
# Files beyond these are no photographs but attacks or mistakes: 64 MiB as stored, 100 megapixels decoded.
MOST_BYTES = 64 * 2**20
MOST_PIXELS = 100_000_000
_ARRAYS = ("jpeg", "offsets", "label")
_READ = (
    b"upright, 8 bits\0"  # how pixels are made of files: where that changes, so do the keys of all results
)


def image_rows(path: Path, image: str, label: str) -> Rows:
    """Yield rows with the columns `image`, a reference, and `label`, each with where it stands.

    Args:
        path: a file of rows, whose image files are relative to its folder; a folder with one folder of images
            for each class; or an archive.
        image: the name of the column that names the image file.
        label: the name of that of the labels.

    Raises:
        InputError: it cannot be read. An image that is missing or none is told by `require_image`.
    """
    if path.is_dir():
        return _of_classes(path, image, label)
    if path.suffix == ARCHIVE:
        return _of_archive(path, image, label)
    return _of_file(path, image)


def _of_file(path: Path, image: str) -> Rows:
    for where, row in read_file(path):
        name = row.get(image)
        if isinstance(name, str) and name and "\0" not in name:
            yield where, {**row, image: str((path.parent / Path(name).expanduser()).absolute())}
        else:
            yield where, row


def _of_classes(folder: Path, image: str, label: str) -> Rows:
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise InputError(
            f"{folder}: no folders of classes in this folder; expected one folder for each label, with its"
            " images.",
            code="no-class-folders",
            file=str(folder),
        )
    for one in classes:
        files = sorted(p for p in one.iterdir() if p.is_file() and p.suffix.lower() in _SUFFIXES)
        if not files:
            raise InputError(
                f"{one}: no images in this folder of a class ({', '.join(sorted(_SUFFIXES))}).",
                code="empty-data",
                file=str(one),
            )
        for file in files:
            yield str(file), {image: str(file.absolute()), label: one.name}


def _of_archive(path: Path, image: str, label: str) -> Rows:
    arrays = _archive(str(path.absolute()), _stamp(path))
    for number, value in enumerate(arrays["label"].tolist()):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        yield f"{path} row {number + 1}", {image: f"{path.absolute()}#{number}", label: text}


def require_image(reference: str, where: str) -> None:
    """Look at the header of an image.

    Raises:
        InputError: there is none, or it is no image, or larger than any that is read; `where` names its row.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(_file_of(reference) or io.BytesIO(image_bytes(reference)), formats=FORMATS) as found:
            width, height = found.size
            try:
                require_range(found)
            except InputError as error:
                raise InputError(f"{reference}: {error}", code=error.code) from error
    except InputError as error:
        raise InputError(f"{where}: {error}", code=error.code) from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise InputError(
            f"{where}: {reference}: not an image that is read here ({known}).", code="not-an-image"
        ) from error
    except Exception as error:  # each decoder of Pillow raises what it likes
        raise InputError(
            f"{where}: {reference}: not an image that can be read: {error}", code="damaged-image"
        ) from error
    if width * height > MOST_PIXELS:
        raise InputError(
            f"{where}: {reference}: an image of {width} x {height} pixels; at most"
            f" {MOST_PIXELS / 1e6:.0f} megapixels are read. Make it smaller.",
            code="image-too-large",
        )


def image_bytes(reference: str) -> bytes:
    """Return the bytes of the image file that `reference` means.

    Raises:
        InputError: there is no such file or place, or it is larger than any image.
    """
    path = _file_of(reference)
    if path is None:
        file, _, number = reference.rpartition("#")
        return _of_place(Path(file), int(number), reference)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{reference}: cannot be read: {error}", code="unreadable-file") from error


def _file_of(reference: str) -> Path | None:
    """Return the image file that `reference` means; None where it is a place of an archive.

    Raises:
        InputError: there is no such file, or it is larger than any image.
    """
    file, mark, number = reference.rpartition("#")
    if mark and file.endswith(ARCHIVE) and number.isdecimal():
        return None
    path = Path(reference)
    try:
        if not path.is_file():
            if path.is_dir():
                raise InputError(f"{reference}: a folder; an image file is expected.", code="not-a-file")
            beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise InputError(
                f"{reference}: no such image file.{nearest(path.name, beside)}", code="missing-file"
            )
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(f"{reference[:300]}: cannot be read: {error}", code="unreadable-file") from error
    if size > MOST_BYTES:
        raise InputError(
            f"{reference}: {size:,} bytes; an image file of at most {MOST_BYTES:,} is read.",
            code="image-file-too-large",
        )
    return path


def content_hash(reference: str) -> str:
    """Return SHA-256 over the bytes of an image file: equal images are equal wherever they lie."""
    return hashlib.sha256(_READ + image_bytes(reference)).hexdigest()


def _of_place(file: Path, number: int, reference: str) -> bytes:
    if not file.is_file():
        raise InputError(f"{file}: no such archive of images.", code="missing-file", file=str(file))
    arrays = _archive(str(file), _stamp(file))
    offsets = arrays["offsets"]
    if number >= len(offsets) - 1:
        raise InputError(
            f"{reference}: the archive has {len(offsets) - 1} images, counted from 0.", code="no-such-image"
        )
    found: bytes = arrays["jpeg"][int(offsets[number]) : int(offsets[number + 1])].tobytes()
    return found


def _stamp(path: Path) -> tuple[int, int]:
    seen = path.stat()
    return seen.st_mtime_ns, seen.st_size


@functools.lru_cache(maxsize=8)
def _archive(path: str, stamp: tuple[int, int]) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of an archive, read once while the file stays as it is (`stamp`).

    Raises:
        InputError: no `.npz`, arrays are missing or do not fit each other, or more than the memory holds.
    """
    import numpy as np

    from smelt.core.memory import available_bytes

    make = "An archive of images is written by numpy.savez(FILE, jpeg=..., offsets=..., label=...)."
    try:
        with zipfile.ZipFile(path) as file:
            there = {Path(m.filename).stem: m for m in file.infolist() if m.filename.endswith(".npy")}
            if missing := [name for name in _ARRAYS if name not in there]:
                raise InputError(
                    f"{path}: no array '{missing[0]}' in it. {make}", code="missing-array", file=str(path)
                )
            needed, free = sum(there[name].file_size for name in _ARRAYS), available_bytes()
            if needed > free:
                raise InputError(
                    f"{path}: its images take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are"
                    " free. Write fewer into one file.",
                    code="out-of-memory",
                    file=str(path),
                )
            arrays = {name: _read(file, there[name], np) for name in _ARRAYS}
    except InputError:
        raise
    except Exception as error:  # those of numpy and of the ways to pack have no other base
        raise InputError(
            f"{path}: not an archive of images that can be read: {error}. {make}",
            code="damaged-file",
            file=str(path),
        ) from error
    _require_fit(path, arrays, make)
    return arrays


def _read(file: zipfile.ZipFile, member: zipfile.ZipInfo, np: Any) -> NDArray[Any]:
    with file.open(member) as stream:
        found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return found


def _require_fit(path: str, arrays: Mapping[str, NDArray[Any]], make: str) -> None:
    jpeg, offsets, label = (arrays[name] for name in _ARRAYS)
    kinds = jpeg.dtype.kind == "u" and jpeg.dtype.itemsize == 1 and offsets.dtype.kind in "iu"
    flat = jpeg.ndim == offsets.ndim == label.ndim == 1
    if not (kinds and flat and label.dtype.kind in "iuUS" and len(offsets) == len(label) + 1 and len(label)):
        said = ", ".join(f"{name} {v.dtype}{list(v.shape)}" for name, v in arrays.items())
        raise InputError(
            f"{path}: its arrays do not fit each other: {said}. {make}",
            code="inconsistent-arrays",
            file=str(path),
        )
    rising = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets[0]) == 0
    if not rising or int(offsets[-1]) != len(jpeg):
        raise InputError(
            f"{path}: its offsets do not rise from 0 to the {len(jpeg):,} bytes of 'jpeg'. {make}",
            code="wrong-offsets",
            file=str(path),
        )
