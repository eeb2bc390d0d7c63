"""The samples of images with captions, and their batches.

Shapes: B = batch, L = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smelt.runtimes.image_text import pad_token_ids
from smelt.runtimes.images import stack_image_inputs
from smelt.tasks.samples import EncodedSample, TensorBatch


@dataclass(frozen=True, slots=True)
class ImageTextSample(EncodedSample):
    """An image and the token ids of its caption; `target` is not used. tokenizer: of its padding."""

    tokenizer: Any = None

    @property
    def token_counts(self) -> tuple[int, int]:
        """The patches of the image, and the tokens of the caption."""
        return (self.image.patches if self.image is not None else 0), len(self.input_ids)

    @staticmethod
    def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
        """Return pixel_values, float32 [B, 3, h, w], input_ids, int64 [B, L], and `labels` of zeros."""
        pixels = stack_image_inputs([sample.image for sample in samples if sample.image is not None])
        tokenizer = next(sample.tokenizer for sample in samples if isinstance(sample, ImageTextSample))
        ids = pad_token_ids([sample.input_ids for sample in samples], config.to_dict(), tokenizer)
        return {
            "pixel_values": torch.from_numpy(pixels),
            "input_ids": torch.from_numpy(ids),
            "labels": torch.zeros(len(samples), dtype=torch.int64),
        }
