"""Embeddings of images and texts by a model with a tower for each.

Shapes: B = batch, L = tokens, D = dimension of the embeddings, n = images or texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.process_group import map_batches, merge_shares
from smelt.generation.backend import FeedBatch, GraphInterface, Logits, ModelGraphs, check_finite_outputs
from smelt.generation.prompt_batches import OnTruncate
from smelt.generation.runner import Runner
from smelt.models.image_text_model import (
    LOGIT_BIAS_KEY,
    LOGIT_SCALE_KEY,
    graph_settings,
    image_embeds,
    text_embeds,
    text_tower,
)
from smelt.models.text_rules import position_limit
from smelt.models.tokenizer import encode_texts
from smelt.runtimes.images import PIXEL_VALUES, ImageProcessor, ImageSource, batch_images, read_processor
from smelt.runtimes.predict_texts import length_sorted_batches
from smelt.stage import Progress, no_progress

VISION_GRAPH, TEXT_GRAPH = "vision_model", "text_model"
IMAGE_EMBEDS, TEXT_EMBEDS = "image_embeds", "text_embeds"


@dataclass(frozen=True)
class ImageTextBatch(FeedBatch):
    """As many images as texts. pixel_values: float32 [B, 3, h, w]; input_ids: int64 [B, L]."""

    pixel_values: NDArray[np.float32]
    input_ids: NDArray[np.int64]

    @property
    def feeds(self) -> dict[str, NDArray[Any]]:
        """The pixels and the token ids."""
        return {PIXEL_VALUES: self.pixel_values, "input_ids": self.input_ids}

    @property
    def size(self) -> tuple[int, int]:
        """Return (h, w) of the images."""
        return self.pixel_values.shape[2], self.pixel_values.shape[3]


@dataclass(frozen=True)
class ImageTextProcessor:
    """What turns images into pixels, and texts into token ids."""

    tokenizer: Any
    images: ImageProcessor

    @property
    def model_max_length(self) -> int:
        """The maximum number of tokens of a caption, of the tokenizer."""
        return int(self.tokenizer.model_max_length)

    @property
    def shape(self) -> tuple[int, int] | None:
        """Return (h, w) of all images; None where they depend on the image."""
        return self.images.shape


class ImageTextRunner(Runner):
    """A `Runner` of two graphs, one for images and one for texts."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(TEXT_GRAPH, frozenset({"input_ids"}), frozenset({TEXT_EMBEDS}), text_embeds),
        independent=(
            GraphInterface(VISION_GRAPH, frozenset({PIXEL_VALUES}), frozenset({IMAGE_EMBEDS}), image_embeds),
        ),
        uses_cache=False,
    )

    @cached_property
    def processor(self) -> ImageProcessor:
        """Return the image processor.

        Raises:
            InputError: its file is missing, or has unsupported settings.
        """
        return read_processor(self.folder)

    def forward(self, batch: Any) -> Logits:
        """Return the embeddings of an `ImageTextBatch`, float32 [2 B, D], those of images first."""
        return np.concatenate([self.forward_images(batch.pixel_values), self.forward_texts(batch.input_ids)])

    def forward_images(self, pixel_values: NDArray[np.float32]) -> Logits:
        """Return the embeddings of images, float32 [B, D]."""
        vectors: Logits = self.backend.call(VISION_GRAPH, {PIXEL_VALUES: pixel_values})[IMAGE_EMBEDS]
        return vectors

    def forward_texts(self, input_ids: NDArray[np.int64]) -> Logits:
        """Return the embeddings of texts, float32 [B, D]."""
        vectors: Logits = self.backend.call(TEXT_GRAPH, {"input_ids": input_ids})[TEXT_EMBEDS]
        return vectors


def pad_token_ids(ids: Sequence[Sequence[int]], config: Any, tokenizer: Any) -> NDArray[np.int64]:
    """Return token ids as int64 [B, L], padded on the right, for SigLIP to the model's limit.

    Args:
        ids: of each text.
        config: config.json.
        tokenizer: whose padding is used.
    """
    length = max(map(len, ids))
    if text_tower(config).pads_to_limit:
        length = position_limit(config) or length
    pad = tokenizer.pad_token_id
    padded = np.full((len(ids), length), 0 if pad is None else pad, dtype=np.int64)
    for row, values in zip(padded, ids, strict=True):
        row[: len(values)] = values
    return padded


def embed_images(
    runner: Any,
    images: Sequence[ImageSource],
    batch_size: int = 32,
    progress: Progress = no_progress,
    names: Sequence[str] | None = None,
) -> NDArray[np.float32]:
    """Return the embeddings of `images`, float32 [n, D] of length 1, in order.

    Args:
        runner: an `ImageTextRunner`, or a wrapper of one.
        images: n of them.
        batch_size: images per batch; no more than that are decoded at a time.
        progress: called for each batch.
        names: names of the images in messages; default: their numbers.

    Raises:
        InputError: an image cannot be read, or images of one batch have different sizes.
        RunError: `non-finite-outputs`.
    """
    if not images:
        raise InputError("No images were given.", code="empty-data")
    labels = names or [f"image {i + 1}" for i in range(len(images))]

    def embed(_: int, indices: range) -> NDArray[np.float32]:
        batch = batch_images([images[i] for i in indices], runner.processor, [labels[i] for i in indices])
        vectors: NDArray[np.float32] = runner.forward_images(batch.pixel_values)
        return vectors

    results: dict[int, NDArray[np.float32]] = {}
    batches = [
        range(start, min(len(images), start + batch_size)) for start in range(0, len(images), batch_size)
    ]
    for indices, vectors in map_batches(embed, batches, runner.workers):
        results.update(zip(indices, vectors, strict=True))
        progress(indices.stop, len(images), "images")
    return check_finite_outputs(np.stack(merge_shares(results)))


def embed_captions(
    runner: Any,
    texts: Sequence[str],
    batch_size: int = 32,
    on_truncate: OnTruncate | None = None,
) -> NDArray[np.float32]:
    """Return the embeddings of `texts`, float32 [n, D] of length 1, in order; equal texts are computed once.

    Args:
        runner: an `ImageTextRunner`, or a wrapper of one.
        texts: n of them.
        batch_size: texts per batch.
        on_truncate: called with the number of texts that were longer than the limit, and that limit.

    Raises:
        InputError: no texts.
        RunError: `non-finite-outputs`.
    """
    if not texts:
        raise InputError("No texts were given.", code="empty-data")
    unique_texts, tools = list(dict.fromkeys(texts)), runner.text
    encoded = encode_texts(unique_texts, tools.tokenizer, tools.max_input_length)
    if encoded.truncated and on_truncate is not None:
        on_truncate(encoded.truncated, tools.max_input_length)

    def embed(_: int, indices: list[int]) -> NDArray[np.float32]:
        ids = pad_token_ids([encoded.ids[i] for i in indices], runner.config, tools.tokenizer)
        vectors: NDArray[np.float32] = runner.forward_texts(ids)
        return vectors

    results: dict[int, NDArray[np.float32]] = {}
    batches = [indices for indices, _ in length_sorted_batches(encoded, batch_size, 0)]
    for indices, vectors in map_batches(embed, batches, runner.workers):
        results.update(zip(indices, vectors, strict=True))
    vectors_by_text = dict(zip(unique_texts, merge_shares(results), strict=True))
    return check_finite_outputs(np.stack([vectors_by_text[text] for text in texts]))


def logit_terms(runner: Any) -> tuple[float, float | None]:
    """Return the factor and the bias of cosines as logits; without a bias it is None (CLIP)."""
    model = getattr(runner.backend, "model", None)
    if model is None:
        return float(runner.config[LOGIT_SCALE_KEY]), runner.config.get(LOGIT_BIAS_KEY)
    terms = graph_settings(model)
    return terms[LOGIT_SCALE_KEY], terms.get(LOGIT_BIAS_KEY)


def match_probabilities(
    similarities: NDArray[np.float64], scale: float, bias: float | None
) -> NDArray[np.float64]:
    """Return the probability of each text for an image, from cosines [..., texts].

    CLIP's add up to 1 over the texts; with a bias (SigLIP) each is that of one pair.
    """
    logits = similarities * scale
    if bias is not None:
        return np.asarray(1 / (1 + np.exp(-(logits + bias))))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def match_texts(
    runner: Any,
    images: Sequence[ImageSource],
    texts: Sequence[str],
    batch_size: int = 32,
    on_truncate: OnTruncate | None = None,
) -> list[dict[str, float]]:
    """Return for each image the probability of each of `texts`, best first; see `match_probabilities`.

    Raises:
        InputError: as `embed_images` and `embed_captions`; a text occurs twice.
    """
    if len(set(texts)) < len(texts):
        raise InputError("The same text occurs twice. Remove it.", code="repeated-text")
    scale, bias = logit_terms(runner)
    vectors = embed_captions(runner, texts, batch_size, on_truncate).astype(np.float64)
    cosines = embed_images(runner, images, batch_size).astype(np.float64) @ vectors.T
    probabilities = match_probabilities(cosines, scale, bias)
    return [ranked_texts(texts, row) for row in probabilities]


def ranked_texts(texts: Sequence[str], values: NDArray[np.float64]) -> dict[str, float]:
    """Return the value of each text, the highest first."""
    return {texts[i]: float(values[i]) for i in np.argsort(-values, kind="stable")}


def read_image_text_processor(folder: Path) -> ImageTextProcessor:
    """Return tokenizer and image processor of the model in `folder`.

    Raises:
        InputError: their files are missing or do not match.
    """
    from smelt.models.checkpoint import load_tokenizer

    return ImageTextProcessor(load_tokenizer(folder), read_processor(folder))
