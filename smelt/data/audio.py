"""Read audio: wav and flac files, and `.npz` arrays, as mono float32 at 16 kHz.

An array file has `audio` (floats of -1 to 1, or integers of 16 bits, [n]) and, unless that is 16,000,
`sampling_rate`. Other rates are resampled by scipy's polyphase filter, as `pipeline` of transformers
resamples a file. Several channels are refused: which of them speaks is not known.
"""

from __future__ import annotations

import functools
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, MissingDependencyError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLING_RATE = 16_000
"""Samples per second that speech models read."""
ARRAY_SUFFIX = ".npz"
MAX_AUDIO_BYTES = 2**30
"""Limit of a file, against attacks and errors: nine hours of 16-bit samples at 16 kHz."""
_READER_TAG = b"mono, 16 kHz\0"  # version of reading: part of the keys of all results
_WRITE_ARRAY = "Write it with numpy.savez(FILE, audio=..., sampling_rate=...)."


def check_audio(reference: str, location: str) -> None:
    """Check the header of an audio file, or an array.

    Raises:
        InputError: it is missing, empty, not audio or not mono; `location` names its row.
        MissingDependencyError: soundfile is not installed.
    """
    try:
        path = _audio_path(reference)
        if path.suffix == ARRAY_SUFFIX:
            _read_array(str(path), path.stat().st_mtime_ns)
            return
        with _open_file(path) as file:
            _check_shape(reference, file.frames, file.channels)
    except InputError as error:
        raise InputError(f"{location}: {error}", code=error.code) from error


def read_audio(reference: str) -> NDArray[np.float32]:
    """Return the samples of a file at 16 kHz, float32 [n], -1 to 1.

    Raises:
        InputError: as `check_audio`; the file ends early.
        MissingDependencyError: soundfile is not installed.
    """
    path = _audio_path(reference)
    if path.suffix == ARRAY_SUFFIX:
        return resample(*_read_array(str(path), path.stat().st_mtime_ns))
    with _open_file(path) as file:
        _check_shape(reference, file.frames, file.channels)
        values, rate = file.read(dtype="float32"), int(file.samplerate)
    _check_shape(reference, len(values), 1)
    return resample(values, rate)


def audio_length(reference: str) -> int:
    """Return the number of samples of a file at 16 kHz.

    Raises:
        InputError: as `check_audio`.
    """
    path = _audio_path(reference)
    if path.suffix == ARRAY_SUFFIX:
        values, rate = _read_array(str(path), path.stat().st_mtime_ns)
        return -(-len(values) * SAMPLING_RATE // rate)
    with _open_file(path) as file:
        return -(-int(file.frames) * SAMPLING_RATE // int(file.samplerate))


def resample(values: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """Return samples, float32 [n], taken `rate` times per second, at 16 kHz."""
    import numpy as np

    if rate == SAMPLING_RATE:
        return values
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, SAMPLING_RATE)
    return np.asarray(resample_poly(values, SAMPLING_RATE // divisor, rate // divisor), dtype=np.float32)


def audio_hash(reference: str) -> str:
    """Return the SHA-256 of the bytes of a file of audio, independent of its path."""
    return hashlib.sha256(_READER_TAG + _audio_path(reference).read_bytes()).hexdigest()


def _audio_path(reference: str) -> Path:
    path = Path(reference)
    try:
        if not path.is_file():
            if path.is_dir():
                raise InputError(f"{reference}: this is a folder. Pass a file of audio.", code="not-a-file")
            names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise InputError(
                f"{reference}: no such file of audio.{did_you_mean(path.name, names)}", code="missing-file"
            )
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # an invalid file name
        raise InputError(f"{reference[:300]}: cannot be read: {error}", code="unreadable-file") from error
    if size > MAX_AUDIO_BYTES:
        raise InputError(
            f"{reference}: the file has {size:,} bytes; the limit is {MAX_AUDIO_BYTES:,}. Cut the audio.",
            code="audio-file-too-large",
        )
    return path


def _check_shape(reference: str, frames: int, channels: int) -> None:
    if channels != 1:
        raise InputError(
            f"{reference}: the audio has {channels} channels, expected one. Mix them (sox IN.wav OUT.wav"
            " channels 1, or the mean over the channels), or write a file for each.",
            code="not-mono",
        )
    if not frames:
        raise InputError(f"{reference}: the audio is empty. Remove its row.", code="empty-audio")


def _open_file(path: Path) -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise MissingDependencyError(
            "soundfile, which reads wav and flac, is not installed. Run: pip install 'smelt[speech]'",
            code="not-installed",
        ) from error
    try:
        return soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        reason = str(error).rstrip(".")
        raise InputError(
            f"{path}: not a readable file of audio: {reason}. Convert it to wav or flac (ffmpeg -i IN -ac 1"
            f" -ar {SAMPLING_RATE} OUT.wav).",
            code="damaged-audio",
        ) from error


@functools.lru_cache(maxsize=8)
def _read_array(path: str, stamp: int) -> tuple[NDArray[np.float32], int]:
    """Return the samples of an array file and their rate, cached while the file is unchanged (`stamp`)."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            values = arrays["audio"]
            rate = int(arrays["sampling_rate"]) if "sampling_rate" in arrays else SAMPLING_RATE
    except Exception as error:  # errors of numpy and of compression have no other common base
        raise InputError(
            f"{path}: not a readable array of audio: {error}. {_WRITE_ARRAY}", code="damaged-audio"
        ) from error
    if values.ndim != 1:
        _check_shape(path, len(values), int(values.shape[-1]) if values.ndim == 2 else 0)
    _check_shape(path, len(values), 1)
    scale = 2**15 if values.dtype == np.int16 else 1
    if rate < 1 or (values.dtype.kind != "f" and values.dtype != np.int16):
        raise InputError(
            f"{path}: audio is {values.dtype} at {rate} samples per second; expected floats or int16."
            f" {_WRITE_ARRAY}",
            code="damaged-audio",
        )
    samples = values.astype(np.float32) / np.float32(scale)
    if not np.isfinite(samples).all():
        raise InputError(f"{path}: audio has NaN or infinite samples. {_WRITE_ARRAY}", code="damaged-audio")
    return samples, rate
