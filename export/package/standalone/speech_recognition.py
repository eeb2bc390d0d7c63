"""Speech recognition with onnxruntime and numpy: python infer.py FILE.wav, or file names on stdin."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from smelt.export.package.standalone.generation_inputs import generation_inputs, new_tokens
from smelt.export.package.standalone.json_values import describe_value
from smelt.export.package.standalone.session import open_graph, run_command_line
from smelt.export.package.standalone.tokenizers_reader import Tokenizer

RATE, HOP, FRAME = 16_000, 160, 400  # samples per second, between two frames, and of a frame
BATCH = 8  # windows: a spectrogram of 30 seconds has a megabyte


def mel_filters(count: int) -> Any:
    """Return the filters of `count` mel bins, float64 [FRAME / 2 + 1, count], on Slaney's scale."""
    mels = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), count + 2)  # 0 to 8,000 Hz
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    slopes = edges[None] - np.linspace(0, RATE / 2, FRAME // 2 + 1)[:, None]
    rising, falling = -slopes[:, :-2] / np.diff(edges)[:-1], slopes[:, 2:] / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


def log_mel(samples: Any, size: int, filters: Any) -> Any:
    """Return the spectrogram of a window, float32 [M, size / HOP], padded with silence to `size` samples."""
    padded = np.pad(np.pad(samples.astype(np.float64), (0, size - len(samples))), FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[:size:HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    values = np.log10(np.maximum(power @ filters, 1e-10)).T
    return ((np.maximum(values, values.max() - 8) + 4) / 4).astype(np.float32)


def silent_wav() -> str:
    """Return a wav file of a tenth of a second of silence, in base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, RATE, 0, "NONE", ""))
        writer.writeframes(bytes(RATE // 5))
    return base64.b64encode(file.getvalue()).decode()


class SpeechRecognizer:
    """SpeechRecognizer(folder)(files) -> texts. Thread-safe; `threads` is per call."""

    cut = 0  # long audio is cut into windows, whose texts are joined
    first_input = silent_wav()  # of the service

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.tokenizer, self.generation = Tokenizer(Path(folder), config["tokenizer"]), config["generation"]
        speech = config["speech"]
        self.size, self.filters = speech["window_samples"], mel_filters(speech["mel_bins"])
        self.prompt = speech["prompt_tokens"]
        path = Path(folder) / self.generation["graph"]
        # sizes in the greedy graph depend on which rows have ended
        self.graph = open_graph(path, threads or config["threads"], path.name != "generate.onnx")
        self.search = generation_inputs(self.generation, self.prompt, self.generation["max_new_tokens"])

    def __call__(self, audio: Iterable[Any], batch_size: int = BATCH) -> list[str]:
        """Return the text of each file, in their order: a path, its bytes, or a result of `samples`."""
        files = [x if isinstance(x, np.ndarray) else self.samples(x) for x in audio]
        windows = [
            (i, values[start : start + self.size])
            for i, values in enumerate(files)
            for start in range(0, len(values), self.size)
        ]
        answers: list[list[str]] = [[] for _ in files]
        for first in range(0, len(windows), min(batch_size, BATCH)):
            part = windows[first : first + min(batch_size, BATCH)]
            features = np.stack([log_mel(values, self.size, self.filters) for _, values in part])
            rows = self.graph.run(["sequences"], {"input_features": features} | self.search)[0]
            for (i, _), row in zip(part, rows, strict=True):
                ids = new_tokens(row, self.prompt, self.generation["eos"])
                answers[i].append(self.tokenizer.decode(ids).strip())
        return [" ".join(filter(None, texts)) for texts in answers]

    def from_json(self, value: Any) -> Any:
        """Return the samples of a file in base64; raise ValueError if it is none."""
        if not isinstance(value, str):
            raise ValueError(f"expected a file of audio in base64, got {describe_value(value)}")
        try:
            return self.samples(base64.b64decode(value, validate=True))
        except binascii.Error as error:
            raise ValueError(f"expected a file of audio in base64: {error}") from None

    def samples(self, audio: str | Path | bytes) -> Any:
        """Return the samples of a wav or flac file at 16 kHz, float32 [n].

        Raises ValueError if it is no such file, has several channels or is empty.
        """
        name = "" if isinstance(audio, bytes) else f"{audio}: "
        try:
            data = audio if isinstance(audio, bytes) else Path(audio).read_bytes()
            values, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        except soundfile.LibsndfileError as error:
            raise ValueError(f"{name}not a readable file of audio: {error.error_string}") from None
        except OSError as error:
            raise ValueError(f"{name}this file cannot be read: {error.strerror}") from None
        if values.ndim != 1:
            raise ValueError(f"{name}expected one channel, got {values.shape[1]}; mix the channels")
        if not len(values):
            raise ValueError(f"{name}the audio is empty")
        if rate == RATE:
            return values
        from scipy.signal import resample_poly

        divisor = math.gcd(rate, RATE)
        return resample_poly(values, RATE // divisor, rate // divisor).astype(np.float32)


if __name__ == "__main__":
    run_command_line(SpeechRecognizer, SpeechRecognizer.__call__, __doc__)
