"""A sample of audio with its transcript, and its batch.

Shapes: B = batch, M = mel bins, F = frames, T = tokens of the longest transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smelt.data.audio import audio_hash
from smelt.runtimes.audio import AudioInput, SpeechFeatures, load_windows
from smelt.tasks.samples import IGNORE_INDEX, EncodedSample, TensorBatch, pad_lists


@dataclass(frozen=True, slots=True)
class AudioSample(EncodedSample):
    """A file of audio, which is read when its batch is made, and the ids of its transcript."""

    audio: AudioInput | None = None
    features: SpeechFeatures | None = None

    @property
    def token_counts(self) -> tuple[int, int]:
        """The states of the encoder, and the length of the transcript."""
        assert self.features is not None
        return self.features.states, len(self.target) if isinstance(self.target, list) else 0

    @property
    def content(self) -> str:
        """The hash of the file."""
        assert self.audio is not None
        return audio_hash(self.audio.reference)

    @staticmethod
    def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
        """Return input_features, float32 [B, M, F], and the decoder's inputs and labels, int64 [B, T]."""
        audio = [s for s in samples if isinstance(s, AudioSample)]
        features = audio[0].features
        assert features is not None
        targets = [s.target for s in audio if isinstance(s.target, list)]
        spectrograms = load_windows([s.audio for s in audio if s.audio is not None], features)
        start = config.decoder_start_token_id
        return {
            "input_features": torch.from_numpy(spectrograms),
            "decoder_input_ids": pad_lists([[start, *ids[:-1]] for ids in targets], int(config.pad_token_id)),
            "labels": pad_lists(targets, IGNORE_INDEX),
        }
