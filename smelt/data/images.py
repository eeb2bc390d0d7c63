"""Read image samples: a file of rows with image paths, a folder of images, or an archive of JPEGs.

A row holds a reference: the path of an image file, or `ARCHIVE.npz#N` for image N (from 0) of an
archive. Callers read the bytes of a reference; reading rows decodes no more than a header. Decoded images
of Pillow are converted to upright orientation and three channels of 8 bits.

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

from smelt.core.errors import InputError, did_you_mean
from smelt.data.media_rows import metadata_file, read_media_rows
from smelt.data.read_rows import RowIterator

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image, Transpose


_EXIF_ORIENTATION = 0x0112  # EXIF tag of the camera orientation
_16_BIT_FORMATS = ("PNG", "PPM")  # formats that Pillow reads with 32 bits if the file has 16


def upright_rgb(image: Image) -> Image:
    """Return `image` in RGB, rotated by its EXIF orientation; of 16-bit grays the upper 8 bits.

    Viewers, `datasets` and transformers' pipelines rotate it in the same way. Pillow alone clips 16-bit grays
    above 255; of 16-bit colors it uses the upper 8 bits, as is done here. Transparency is ignored.

    Raises:
        InputError: its values have 32 bits; see `reject_32_bit_image`.
    """
    reject_32_bit_image(image)
    image.load()  # this already rotates TIFF
    transposed = _exif_transposition(image)
    if transposed is not None:
        image = image.transpose(transposed)
    return _from_16_bits(image) if image.mode.startswith("I") else image.convert("RGB")


def reject_32_bit_image(image: Image) -> None:
    """Reject images with 32-bit values by their mode; nothing is decoded.

    Raises:
        InputError: its values are integers or floats of 32 bits, whose white level no file
            defines.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in _16_BIT_FORMATS):
        raise InputError(
            f"32-bit pixels (Pillow's mode {image.mode}) have no defined white level. Save the image"
            " with 8 or 16 bits.",
            code="unsupported-image-mode",
        )


def _exif_transposition(image: Image) -> Transpose | None:
    """Return the transposition that makes `image` upright; None if it already is."""
    from PIL.Image import Transpose

    transpositions = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        return transpositions.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged EXIF is ignored; the image itself is intact
        return None


def _from_16_bits(image: Image) -> Image:
    import numpy as np
    from PIL.Image import fromarray

    values = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16) >> 8
    return fromarray(values.astype(np.uint8)).convert("RGB")


ARCHIVE_SUFFIX = ".npz"
# Other formats of Pillow start programs (EPS), or are unusual containers.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
# Limits against attacks and errors: 64 MiB as stored, 100 megapixels decoded.
MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 100_000_000
_ARCHIVE_ARRAYS = ("jpeg", "offsets", "label")
_DECODER_TAG = b"upright, 8 bits\0"  # version of image decoding: part of the keys of all results


def read_image_rows(path: Path, image: str, label: str) -> RowIterator:
    """Yield rows with the columns `image`, a reference, and `label`, each with its position.

    Args:
        path: a file of rows, with image paths relative to its folder; a folder with one folder of images
            for each class, or with `metadata.csv`, `.jsonl` or `.parquet` (the layout `imagefolder` of
            `datasets`); or an archive.
        image: the name of the column with the image path.
        label: the name of the column with the label.

    Raises:
        InputError: it cannot be read. Missing or invalid images are reported by `check_image`.
    """
    if path.is_dir() and metadata_file(path) is None:
        return _rows_of_class_folders(path, image, label)
    if path.suffix == ARCHIVE_SUFFIX:
        return _rows_of_archive(path, image, label)
    return read_media_rows(path, image)


def _rows_of_class_folders(folder: Path, image: str, label: str) -> RowIterator:
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise InputError(
            f"{folder}: this folder contains no class folders. Create one folder per label with the"
            " images of this label.",
            code="no-class-folders",
            file=str(folder),
        )
    for class_folder in classes:
        files = sorted(
            p for p in class_folder.iterdir() if p.is_file() and p.suffix.lower() in _IMAGE_SUFFIXES
        )
        if not files:
            raise InputError(
                f"{class_folder}: this class folder contains no images"
                f" ({', '.join(sorted(_IMAGE_SUFFIXES))}).",
                code="empty-data",
                file=str(class_folder),
            )
        for file in files:
            yield str(file), {image: str(file.absolute()), label: class_folder.name}


def _rows_of_archive(path: Path, image: str, label: str) -> RowIterator:
    arrays = _load_archive(str(path.absolute()), _file_stamp(path))
    for number, value in enumerate(arrays["label"].tolist()):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        yield f"{path} row {number + 1}", {image: f"{path.absolute()}#{number}", label: text}


def check_image(reference: str, location: str) -> None:
    """Check the header of an image.

    Raises:
        InputError: it is missing, not an image, or too large; `location` names its row.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(
            _image_path(reference) or io.BytesIO(read_image_bytes(reference)), formats=IMAGE_FORMATS
        ) as opened_image:
            width, height = opened_image.size
            try:
                reject_32_bit_image(opened_image)
            except InputError as error:
                raise InputError(f"{reference}: {error}", code=error.code) from error
    except InputError as error:
        raise InputError(f"{location}: {error}", code=error.code) from error
    except UnidentifiedImageError as error:
        format_names = ", ".join(IMAGE_FORMATS)
        raise InputError(
            f"{location}: {reference}: not a supported image format ({format_names}).", code="not-an-image"
        ) from error
    except Exception as error:  # Pillow's decoders raise many types of errors
        raise InputError(
            f"{location}: {reference}: not a readable image: {error}", code="damaged-image"
        ) from error
    if width * height > MAX_IMAGE_PIXELS:
        raise InputError(
            f"{location}: {reference}: the image has {width} x {height} pixels; the limit is"
            f" {MAX_IMAGE_PIXELS / 1e6:.0f} megapixels. Resize the image.",
            code="image-too-large",
        )


def read_image_bytes(reference: str) -> bytes:
    """Return the bytes of the image at `reference`.

    Raises:
        InputError: there is no such file or index, or it is too large.
    """
    path = _image_path(reference)
    if path is None:
        file, _, number = reference.rpartition("#")
        return _archive_image_bytes(Path(file), int(number), reference)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{reference}: cannot be read: {error}", code="unreadable-file") from error


def _image_path(reference: str) -> Path | None:
    """Return the image file of `reference`; None for an image in an archive.

    Raises:
        InputError: there is no such file, or it is too large.
    """
    file, separator, number = reference.rpartition("#")
    if separator and file.endswith(ARCHIVE_SUFFIX) and number.isdecimal():
        return None
    path = Path(reference)
    try:
        if not path.is_file():
            if path.is_dir():
                raise InputError(f"{reference}: this is a folder. Pass an image file.", code="not-a-file")
            names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise InputError(
                f"{reference}: no such image file.{did_you_mean(path.name, names)}", code="missing-file"
            )
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # an invalid file name
        raise InputError(f"{reference[:300]}: cannot be read: {error}", code="unreadable-file") from error
    if size > MAX_IMAGE_BYTES:
        raise InputError(
            f"{reference}: the image file has {size:,} bytes; the limit is {MAX_IMAGE_BYTES:,} bytes."
            " Resize or compress the image.",
            code="image-file-too-large",
        )
    return path


def image_hash(reference: str) -> str:
    """Return the SHA-256 of the bytes of an image, independent of its path."""
    return hashlib.sha256(_DECODER_TAG + read_image_bytes(reference)).hexdigest()


def _archive_image_bytes(file: Path, number: int, reference: str) -> bytes:
    if not file.is_file():
        raise InputError(
            f"{file}: image archive not found. Check the path.", code="missing-file", file=str(file)
        )
    arrays = _load_archive(str(file), _file_stamp(file))
    offsets = arrays["offsets"]
    if number >= len(offsets) - 1:
        raise InputError(
            f"{reference}: the archive has {len(offsets) - 1} images, numbered from 0.", code="no-such-image"
        )
    image_bytes: bytes = arrays["jpeg"][int(offsets[number]) : int(offsets[number + 1])].tobytes()
    return image_bytes


def _file_stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=8)
def _load_archive(path: str, stamp: tuple[int, int]) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of an archive, cached while the file is unchanged (`stamp`).

    Raises:
        InputError: not an `.npz`, arrays are missing or inconsistent, or not enough memory.
    """
    import numpy as np

    from smelt.core.system import available_bytes

    make = "Write an archive of images with numpy.savez(FILE, jpeg=..., offsets=..., label=...)."
    try:
        with zipfile.ZipFile(path) as file:
            members = {Path(m.filename).stem: m for m in file.infolist() if m.filename.endswith(".npy")}
            if missing := [name for name in _ARCHIVE_ARRAYS if name not in members]:
                raise InputError(
                    f"{path}: the array '{missing[0]}' is missing. {make}",
                    code="missing-array",
                    file=str(path),
                )
            needed, free = sum(members[name].file_size for name in _ARCHIVE_ARRAYS), available_bytes()
            if needed > free:
                raise InputError(
                    f"{path}: the images need {needed / 1e9:.1f} GB of memory, but only"
                    f" {free / 1e9:.1f} GB are free. Write fewer images to one file.",
                    code="out-of-memory",
                    file=str(path),
                )
            arrays = {name: _read_member(file, members[name], np) for name in _ARCHIVE_ARRAYS}
    except InputError:
        raise
    except Exception as error:  # errors of numpy and of compression have no other common base
        raise InputError(
            f"{path}: not a readable archive of images: {error}. {make}",
            code="damaged-file",
            file=str(path),
        ) from error
    _check_archive(path, arrays, make)
    return arrays


def _read_member(file: zipfile.ZipFile, member: zipfile.ZipInfo, np: Any) -> NDArray[Any]:
    with file.open(member) as stream:
        member_array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return member_array


def _check_archive(path: str, arrays: Mapping[str, NDArray[Any]], make: str) -> None:
    jpeg, offsets, label = (arrays[name] for name in _ARCHIVE_ARRAYS)
    kinds = jpeg.dtype.kind == "u" and jpeg.dtype.itemsize == 1 and offsets.dtype.kind in "iu"
    flat = jpeg.ndim == offsets.ndim == label.ndim == 1
    if not (kinds and flat and label.dtype.kind in "iuUS" and len(offsets) == len(label) + 1 and len(label)):
        summary = ", ".join(f"{name} {v.dtype}{list(v.shape)}" for name, v in arrays.items())
        raise InputError(
            f"{path}: the arrays are inconsistent: {summary}. {make}",
            code="inconsistent-arrays",
            file=str(path),
        )
    is_ascending = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets[0]) == 0
    if not is_ascending or int(offsets[-1]) != len(jpeg):
        raise InputError(
            f"{path}: the offsets must increase from 0 to {len(jpeg):,}, the number of bytes in"
            f" 'jpeg'. {make}",
            code="wrong-offsets",
            file=str(path),
        )
