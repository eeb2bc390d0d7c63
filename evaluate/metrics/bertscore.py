"""BERTScore (Zhang et al. 2020): similarity of the contextual embeddings of tokens.

Shapes: B = pairs of a batch, P and R = tokens of the longest prediction and reference, D = width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from smelt.core.errors import InputError
from smelt.core.files import json_hash, load_json, resolve_path, sha256_of
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    CORRELATION_LIMITS,
    ExampleRows,
    Rows,
    TextMetric,
    TextSamples,
)
from smelt.models.families.registry import find_family
from smelt.stage import Settings

if TYPE_CHECKING:
    import torch

_BATCH_SIZE = 32  # pairs
_MAX_TOKENS = 512  # of a text, for a model without a position table


class BertScoreSettings(Settings):
    """Settings of `bertscore`."""

    model: str = Field(min_length=1, description="folder of an encoder with weights in safetensors")
    layer: int = Field(
        ge=1, le=1000, description="hidden states after this block; bert-score uses 17 of roberta-large"
    )


class BertScore(TextMetric):
    """Rows, K = 1: F1, -1..1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the F1 of each prediction, see `bertscore_rows`."""
        base = samples.base
        rows = bertscore_rows(samples.predictions, samples.references, settings, base, samples.device)
        model = f"model:{Path(settings['model']).name}|weights:{encoder_hash(settings, base)[:12]}"
        signature = f"{model}|layer:{settings['layer']}|idf:no|rescaled:no|refs:best|{BOOTSTRAP_SIGNATURE}"
        return ExampleRows(rows, signature)

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check the folder of the model, if the settings name one."""
        if settings:
            check_encoder(settings, base)

    def fingerprint(self, settings: Mapping[str, Any], base: Path) -> str:
        """Return a hash of the weights and the tokenizer of the model."""
        return encoder_hash(settings, base)


def check_encoder(settings: Mapping[str, Any], base: Path) -> Path:
    """Return the folder of BERTScore's model, checked without loading it.

    Args:
        settings: `model`, a folder, and `layer`.
        base: the folder that a relative path starts from.

    Raises:
        InputError: `missing-file`: no such folder, or it has no config.json or no safetensors; `wrong-value`:
            the model is no encoder, or has fewer layers than `layer`.
    """
    folder = resolve_path(base, settings["model"])
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder}: not the folder of a model: it needs config.json, a tokenizer and weights in"
            " safetensors. Download an encoder such as roberta-large and set model to its folder.",
            code="missing-file",
            file=str(folder),
        )
    config = load_json(folder / "config.json")
    layers = config.get("num_hidden_layers") or config.get("n_layers") or 0
    family = find_family(config)
    is_encoder = not config.get("is_encoder_decoder") if family is None else family.architecture == "encoder"
    if not is_encoder or config.get("is_decoder") or settings["layer"] > layers:
        raise InputError(
            f"{folder}: {config.get('model_type')} model with {layers} layers; BERTScore needs an encoder"
            f" with at least layer {settings['layer']}. Set another model, or a lower layer.",
            code="wrong-value",
        )
    return folder


def encoder_hash(settings: Mapping[str, Any], base: Path) -> str:
    """Return a hash of the weights and the tokenizer of BERTScore's model."""
    folder = check_encoder(settings, base)
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".txt", ".model"))
    return _files_hash(tuple((path, path.stat().st_mtime_ns) for path in files))


@cache
def _files_hash(files: tuple[tuple[Path, int], ...]) -> str:
    """Return a hash of the content of files, each with its time: large weights are read once in a run."""
    return json_hash([[path.name, sha256_of(path)] for path, _ in files])


def bertscore_rows(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    settings: Mapping[str, Any],
    base: Path,
    device: str = "cpu",
) -> Rows:
    """Return BERTScore's F1 of each prediction, the maximum over its references; 0 for an empty text.

    Each token is matched with the most similar one of the other text, by the cosine of their hidden states
    after `layer` blocks; precision is the mean over the tokens of the prediction, recall over those of the
    reference, both without special tokens, which can be matched. Zhang et al. 2020, without idf weights and
    without rescaling, as the package bert-score computes it by default.

    Raises:
        InputError: as `check_encoder`, or the model cannot be loaded (`damaged-file`).
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    from smelt.models.empty_model import silence_transformers
    from smelt.runtimes.device import torch_device

    folder = check_encoder(settings, base)
    try:
        with silence_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{folder}: cannot be loaded as an encoder: {error}", code="damaged-file", file=str(folder)
        ) from error
    model = model.to(torch_device(device)).eval()
    encode = partial(_encode, model, tokenizer, settings["layer"])
    pairs = [
        (example_index, prediction, reference)
        for example_index, (prediction, texts) in enumerate(zip(predictions, references, strict=True))
        for reference in texts
    ]
    pairs.sort(key=lambda pair: len(pair[1]) + len(pair[2]))
    best = [0.0] * len(predictions)
    with torch.inference_mode():
        for start in range(0, len(pairs), _BATCH_SIZE):
            example_indices, predicted_texts, reference_texts = zip(
                *pairs[start : start + _BATCH_SIZE], strict=True
            )
            values = _greedy_f1(encode(predicted_texts), encode(reference_texts))
            for example_index, value in zip(example_indices, values.tolist(), strict=True):
                best[example_index] = max(best[example_index], value)
    return [[value] for value in best]


EncodedTokens = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Unit vectors [B, L, D], and bool [B, L]: which are tokens, and which are tokens of the text itself."""


def _encode(model: Any, words: Any, layer: int, texts: Sequence[str]) -> EncodedTokens:
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    positions = getattr(model.config, "max_position_embeddings", None) or _MAX_TOKENS
    padding = getattr(table, "padding_idx", None)
    if padding is not None:  # positions start after that of the padding
        positions -= padding + 1
    limit = min(words.model_max_length, positions)
    batch = words(
        [text.strip() for text in texts],
        padding=True,
        truncation=True,
        max_length=limit,
        return_special_tokens_mask=True,
        return_tensors="pt",
    ).to(model.device)
    special = batch.pop("special_tokens_mask").bool()
    states = model(**batch, output_hidden_states=True).hidden_states[layer].float()
    present = batch["attention_mask"].bool()
    return states / states.norm(dim=-1, keepdim=True), present, present & ~special


def _greedy_f1(prediction: EncodedTokens, reference: EncodedTokens) -> torch.Tensor:
    """Return F1 of greedy matching for each pair: [B]."""
    similarity = prediction[0] @ reference[0].transpose(1, 2)  # [B, P, R]
    absent = ~(prediction[1][:, :, None] & reference[1][:, None, :])
    similarity = similarity.masked_fill(absent, -1.0)
    prediction_mask, other = prediction[2].float(), reference[2].float()
    precision = (similarity.amax(dim=2) * prediction_mask).sum(1) / prediction_mask.sum(1).clamp(min=1)
    recall = (similarity.amax(dim=1) * other).sum(1) / other.sum(1).clamp(min=1)
    total = precision + recall
    f1 = 2 * precision * recall / total.where(total != 0, 1)
    return f1 * ((prediction_mask.sum(1) > 0) & (other.sum(1) > 0))


BERTSCORE = BertScore(
    name="bertscore",
    title="BERTScore",
    unit="BERTScore",
    description="F1 of matched token embeddings times 100, without idf weights and rescaling, best reference",
    optional=("translation", "summarization", "text-generation"),
    kind="mean",
    limits=CORRELATION_LIMITS,
    libraries=("transformers", "torch"),
    settings=BertScoreSettings,
    reads_file=True,
)
