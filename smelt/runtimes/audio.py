"""From audio to spectrograms and batches, for every runner: read, cut into windows, transform.

A file that is longer than the model's window (30 seconds of a Whisper) is cut into windows that follow each
other; each is recognized alone, without timestamps, and their texts are joined. Spectrograms are computed by
transformers' WhisperFeatureExtractor.

Shapes: B = batch, M = mel bins, F = frames, T = states of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.data.audio import SAMPLING_RATE, audio_length, check_audio, read_audio
from smelt.data.splits import Split
from smelt.generation.backend import AudioBatch, Batch
from smelt.generation.speech_prompt import speech_start_tokens

PROCESSOR_FILE = "preprocessor_config.json"
_HOP, _WINDOW = 160, 400  # samples between two frames, and of one


class SpeechFeatures:
    """The spectrogram of a window. states: T. window_samples: of a window."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: config.json."""
        from transformers import WhisperFeatureExtractor

        self.states, mel_bins = int(config["max_source_positions"]), int(config["num_mel_bins"])
        self.window_samples = 2 * self.states * _HOP  # the encoder halves the number of frames
        self._extractor = WhisperFeatureExtractor(feature_size=mel_bins, hop_length=_HOP, n_fft=_WINDOW)

    def __call__(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the spectrograms of windows, float32 [B, M, F]; they are padded with silence."""
        features = self._extractor(
            list(windows), sampling_rate=SAMPLING_RATE, max_length=self.window_samples, return_tensors="np"
        )["input_features"]
        return np.ascontiguousarray(features, dtype=np.float32)


def check_preprocessing(folder: Path) -> None:
    """Require that the preprocessing of a model is the usual one of Whisper; without a file it is.

    Raises:
        InputError: `unsupported-preprocessing`.
    """
    path = folder / PROCESSOR_FILE
    settings, config = read_json_object(path), read_json_object(folder / "config.json")
    expected = {
        "sampling_rate": SAMPLING_RATE, "hop_length": _HOP, "n_fft": _WINDOW, "dither": 0.0,
        "feature_size": config.get("num_mel_bins"), "do_normalize": False,
    }  # fmt: skip
    for name, value in expected.items():
        if settings.get(name, value) != value:
            raise InputError(
                f"{path}: {name} is {settings[name]!r}; supported is {value!r}.",
                code="unsupported-preprocessing",
                setting=name,
            )


@dataclass(frozen=True)
class SpeechProcessor:
    """What training reads audio and transcripts with.

    tokenizer: of transformers. features: of the model. start_tokens: language and task, which begin each
    target.
    """

    tokenizer: Any = field(repr=False)
    features: SpeechFeatures = field(repr=False)
    start_tokens: tuple[int, ...]
    eos_token_id: int

    @property
    def model_max_length(self) -> int:
        """The maximum number of tokens of a transcript, of the tokenizer."""
        return int(self.tokenizer.model_max_length)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    def targets(self, texts: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Return the ids of transcripts after the decoder's first token, and how many were truncated."""
        ids = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        room = limit - len(self.start_tokens) - 1
        rows = [[*self.start_tokens, *row[:room], self.eos_token_id] for row in ids]
        return rows, sum(len(row) > room for row in ids)


def read_speech_processor(folder: Path, language: str | None = None) -> SpeechProcessor:
    """Return the processor of the model in `folder`; language: of its audio, if generation_config has none.

    Raises:
        InputError: files of the tokenizer are missing, preprocessing is not supported, or no language is set.
    """
    from smelt.models.checkpoint import load_tokenizer

    config = read_json_object(folder / "config.json")
    generation = read_json_object(folder / "generation_config.json") or config
    check_preprocessing(folder)
    tokenizer = load_tokenizer(folder)
    eos: Any = generation.get("eos_token_id", config.get("eos_token_id"))
    return SpeechProcessor(
        tokenizer,
        SpeechFeatures(config),
        tuple(speech_start_tokens(generation, config, language)),
        int(eos[0] if isinstance(eos, list) else eos),
    )


class AudioInput(NamedTuple):
    """A window of a file. name: its sample in messages. window: its number, from 0."""

    reference: str
    name: str
    window: int = 0


def split_audio(split: Split) -> list[AudioInput]:
    """Return the first window of each file of `split`, in order."""
    names = [f"{split.origin} row {e.row}" if e.row else split.origin for e in split.examples]
    return [AudioInput(e.text, name) for e, name in zip(split.examples, names, strict=True)]


def load_windows(inputs: Sequence[AudioInput], features: SpeechFeatures) -> NDArray[np.float32]:
    """Return the spectrograms of windows, float32 [B, M, F].

    Raises:
        InputError: a file cannot be read; the message has its name.
    """
    windows = []
    for reference, name, number in inputs:
        try:
            samples = read_audio(reference)
        except InputError as error:
            raise InputError(f"{name}: {error}", code=error.code) from error
        start = number * features.window_samples
        windows.append(samples[start : start + features.window_samples])
    return features(windows)


def audio_batch(inputs: Sequence[AudioInput], features: SpeechFeatures) -> AudioBatch:
    """Return windows as a batch that reads them when it is used."""
    ids = np.zeros((len(inputs), features.states), dtype=np.int64)
    return AudioBatch(ids, np.ones_like(ids), load=partial(load_windows, inputs, features))


def file_windows(
    references: Sequence[str], features: SpeechFeatures, first_only: bool = False
) -> list[AudioInput]:
    """Return the windows of files, file by file; with `first_only` only the first of each, as in training."""
    inputs = []
    for number, reference in enumerate(references, 1):
        name = f"audio {number}"
        check_audio(reference, name)
        count = 1 if first_only else -(-audio_length(reference) // features.window_samples)
        inputs += [AudioInput(reference, name, window) for window in range(count)]
    return inputs


def window_batches(
    inputs: Sequence[AudioInput], features: SpeechFeatures, batch_size: int
) -> list[tuple[list[int], Batch]]:
    """Return batches of windows in order, each with their numbers."""
    parts = [range(len(inputs))[i : i + batch_size] for i in range(0, len(inputs), batch_size)]
    return [(list(part), audio_batch([inputs[i] for i in part], features)) for part in parts]


def join_windows(texts: Sequence[str], inputs: Sequence[AudioInput]) -> list[str]:
    """Return the text of each file from those of its windows."""
    parts: list[list[str]] = []
    for text, window in zip(texts, inputs, strict=True):
        if window.window == 0:
            parts.append([])
        parts[-1].append(text.strip())
    return [" ".join(filter(None, each)) for each in parts]
