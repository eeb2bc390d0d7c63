"""Images and texts in one space: retrieval of captions and images, and classification by captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.messages import CONTROL_ESCAPES
from smelt.data.examples import missing_column, nonempty_text, parse_image
from smelt.data.images import check_image, read_image_rows
from smelt.data.read_rows import RowIterator
from smelt.data.splits import Columns, Example, Split
from smelt.tasks.spec import PackageClass, TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.tasks.samples import EncodedSample

CAPTION_TEMPLATE = "a photo of a {label}"  # of CLIP's authors, for a row with a label and no text


class ImageText(TaskSpec):
    """Images with texts."""

    name = "image-text"
    column_roles = ("image", "text", "label")
    optional_roles = ("text", "label")
    input_roles = ("image", "text")
    method = "match"
    command_input = "$'IMAGE.png\\ta photo of a cat\\ta photo of a dog'"
    service_input = '{"image": "BASE64 OF A FILE", "text": ["a photo of a cat", "a photo of a dog"]}'
    call = "image file and texts to probabilities"
    call_includes = "reading, decoding and resizing files, and tokenizing, are"
    sample_noun = "image"
    rate_unit = "images/s"
    preprocessing = "decoding"
    postprocessing = "probabilities"
    preprocessing_libraries = ("pillow",)
    row_example = '{"image": "FILE", "text": "..."}, or {"image": "FILE", "label": "..."}'
    main_metric = "text_retrieval_recall@1"
    distill_losses = "sentence_embedding: 1.0, pairwise_similarity: 1.0"
    hub_tag = "zero-shot-image-classification"
    graph_output = "text_embeds"
    package = PackageClass(
        "image_text",
        "ImageTextMatcher",
        'print(ImageTextMatcher()([{"image": "photo.jpg", "text": ["a photo of a cat", "a dog"]}]))',
    )

    def read_rows(self, path: Path, columns: Columns) -> RowIterator:
        """Yield rows with a reference to an image, as `TaskSpec.read_rows`."""
        return read_image_rows(path, columns.image, columns.label)

    def check_input(self, text: str, location: str) -> None:
        """Check the header of an image."""
        check_image(text, location)

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`; of a list of texts one is to be chosen."""
        image, text, label = (
            parse_image(row, location, columns),
            row.get(columns.text),
            _label(row, location, columns),
        )
        if isinstance(text, list):
            return Example(image, choices=_candidates(text, location, columns.text), label=label)
        if text is None and label is not None and "text" not in columns.model_fields_set:
            return Example(image, text_pair=CAPTION_TEMPLATE.format(label=label), label=label)
        if text is None and columns.text not in row:
            raise missing_column(row, columns.text, location, "text")
        return Example(image, text_pair=nonempty_text(row, columns.text, location, "text"), label=label)

    def parse_argument(self, text: str) -> Example:
        """Return the image and the texts of a line, separated by tabs; of several texts one is chosen."""
        image, *texts = text.split("\t")
        if not texts or not all(item.strip() for item in texts) or len(set(texts)) < len(texts):
            raise InputError(
                f"expected an image file and a text or several different ones, separated by tabs, got"
                f" {repr(text)[:80]}.",
                code="wrong-value",
            )
        return Example(image, choices=tuple(texts)) if len(texts) > 1 else Example(image, text_pair=texts[0])

    def check_examples(self, examples: Sequence[Example], columns: Columns) -> None:
        """Require that all samples have a label or none."""
        from smelt.data.labels import require_all_or_none

        lines = [example.line or number for number, example in enumerate(examples, start=1)]
        require_all_or_none((e.label is not None for e in examples), lines, columns.label, "label")

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> None:
        """Return None: images cannot be written as text."""

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return what the class reads besides tokenizer and images: length of padding, and logits."""
        from smelt.models.image_text_model import LOGIT_BIAS_KEY, LOGIT_SCALE_KEY, text_tower
        from smelt.models.text_rules import position_limit

        return {
            "padded_length": position_limit(config) if text_tower(config).pads_to_limit else None,
            "logit_scale": config[LOGIT_SCALE_KEY],
            "logit_bias": config.get(LOGIT_BIAS_KEY),
        }

    def recognizes_row(self, row: Mapping[str, Any], columns: Columns, named: Columns) -> bool:
        """Return whether a row has an image with a text."""
        return columns.image in row and columns.text in row

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return images, decoded when their batch is made, with their captions, as `TaskSpec.encode`."""
        from smelt.models.tokenizer import encode_texts
        from smelt.runtimes.images import split_images
        from smelt.tasks.image_text_samples import ImageTextSample

        text_tokenizer = tokenizer.tokenizer
        encoded = encode_texts(captions(split), text_tokenizer, limit)
        samples: list[EncodedSample] = [
            ImageTextSample(list(ids), None, 0, image=image, tokenizer=text_tokenizer)
            for ids, image in zip(encoded.ids, split_images(split, tokenizer.images), strict=True)
        ]
        return samples, encoded.truncated

    def token_rows(self, split: Split, tokenizer: Any) -> list[list[int]]:
        """Return the ids of every caption, as `TaskSpec.token_rows`."""
        ids: list[list[int]] = tokenizer(captions(split), truncation=False, verbose=False)["input_ids"]
        return ids

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> list[dict[str, float]]:
        """Return for each image its texts with their values, best first: probabilities of several texts.

        Of a single text the value is the cosine of both embeddings.
        """
        from smelt.runtimes.image_text import (
            embed_captions,
            embed_images,
            logit_terms,
            match_probabilities,
            ranked_texts,
        )

        texts = [list(e.choices) or [str(e.text_pair)] for e in examples]
        names = [f"row {e.row}" if e.row else f"image {n}" for n, e in enumerate(examples, 1)]
        images = embed_images(runner, [e.text for e in examples], batch_size, names=names).astype(np.float64)
        flat_texts = [text for candidates in texts for text in candidates]
        vectors = embed_captions(runner, flat_texts, batch_size, on_truncate).astype(np.float64)
        by_text, (scale, bias) = dict(zip(flat_texts, vectors, strict=True)), logit_terms(runner)
        results = []
        for example, image, candidates in zip(examples, images, texts, strict=True):
            values = np.stack([by_text[text] for text in candidates]) @ image
            if example.choices:
                values = match_probabilities(values, scale, bias)
            results.append(ranked_texts(candidates, values))
        return results

    def result_line(self, result: dict[str, float]) -> str:
        """Return the best text, a tab, and its value."""
        text, value = next(iter(result.items()))
        return f"{text.translate(CONTROL_ESCAPES)}\t{value:.4f}"

    def result_fields(self, result: dict[str, float]) -> dict[str, Any]:
        """Return the best text and the value of each."""
        if len(result) == 1:
            return {"similarity": next(iter(result.values()))}
        return {"label": next(iter(result)), "probabilities": result}

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return the number of captions that the runner truncates."""
        from smelt.models.tokenizer import encode_texts

        texts = [text for e in examples for text in (e.choices or (str(e.text_pair),))]
        return encode_texts(texts, runner.text.tokenizer, runner.text.max_input_length).truncated

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of samples with a caption of more than `limit` tokens."""
        return {i for i, ids in enumerate(self.token_rows(split, tokenizer)) if len(ids) > limit}


def captions(split: Split) -> list[str]:
    """Return the caption of each sample.

    Raises:
        InputError: `missing-captions`.
    """
    for number, example in enumerate(split.examples, start=1):
        if example.text_pair is None:
            raise InputError(
                f"{split.origin}:{example.line or number}: the text is a list, of which one is chosen, but"
                " training and scores need the caption of each image. Write one text.",
                code="missing-captions",
            )
    return [str(example.text_pair) for example in split.examples]


def class_embeddings(
    labels: Sequence[str], texts: Sequence[str], vectors: NDArray[np.float64]
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the labels, sorted, and the embedding of each, float64 [classes, D]: the mean of its captions.

    Several captions of a label are CLIP's ensemble of prompts (Radford et al. 2021, arXiv:2103.00020).

    Args:
        labels: of n samples.
        texts: n captions.
        vectors: float64 [n, D], of the captions.
    """
    names = sorted(set(labels))
    by_label: dict[str, dict[str, NDArray[np.float64]]] = {name: {} for name in names}
    for label, text, vector in zip(labels, texts, vectors, strict=True):
        by_label[label][text] = vector
    return names, np.stack([np.mean(list(by_label[name].values()), axis=0) for name in names])


def _label(row: Mapping[str, Any], location: str, columns: Columns) -> str | None:
    value = row.get(columns.label)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InputError(
            f"{location}: column '{columns.label}' must be the name of a class, got {repr(value)[:80]}.",
            code="wrong-column-type",
        )
    return str(value)


def _candidates(texts: list[Any], location: str, column: str) -> tuple[str, ...]:
    unique_texts = {text for text in texts if isinstance(text, str) and text.strip()}
    if not texts or len(unique_texts) < len(texts):
        raise InputError(
            f"{location}: column '{column}' must be a text, or a list of different texts, got"
            f" {repr(texts)[:80]}.",
            code="wrong-column-type",
        )
    return tuple(texts)


TASK = ImageText()
