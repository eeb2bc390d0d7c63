"""Sentence similarity: embeddings of texts; the two texts of a pair are embedded separately."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.data.examples import missing_column, nonempty_text, parse_pair
from smelt.data.labels import parse_score, require_all_or_none
from smelt.data.splits import Columns, Example, Split, columns_hint
from smelt.tasks.spec import PackageClass, TaskSpec, token_counts

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.tasks.samples import EncodedSample

HIDDEN_STATES_OUTPUT = "last_hidden_state"  # of a third-party graph; pooled to embeddings


class SentenceSimilarity(TaskSpec):
    """Sentence similarity."""

    name = "sentence-similarity"
    column_roles = ("text", "text_pair", "label")
    optional_roles = ("text_pair", "label")
    target_roles = ("label",)
    method = "embed"
    row_example = '{"text": "..."}, for scored pairs also "text_pair" and "label"'
    main_metric = "agreement"
    distill_losses = "sentence_embedding: 1.0, pairwise_similarity: 1.0"
    graph_output = "sentence_embedding"
    package = PackageClass("sentence_similarity", "Embedder", 'print(Embedder()(["TEXT", "ANOTHER"]).shape)')

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        text_pair = parse_pair(row, location, columns)
        if "label" in columns.model_fields_set and columns.label not in row:
            raise missing_column(row, columns.label, location, "label")
        score = parse_score(row.get(columns.label), location, columns.label)
        if score is not None and text_pair is None:
            raise InputError(
                f"{location}: there is a score ('{columns.label}') but no second text in"
                f" '{columns.text_pair}'. {columns_hint({'text_pair': 'NAME'})}",
                code="missing-column",
            )
        return Example(nonempty_text(row, columns.text, location, "text"), text_pair=text_pair, label=score)

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the size of an embedding."""
        from smelt.models.families.registry import find_family

        family = find_family(config)
        return {"width": (family.hidden_size(config) or 0) if family else 0}

    def check_examples(self, examples: Sequence[Example], columns: Columns) -> None:
        """Require that all samples have a second text or none, and the same for scores."""
        lines = [example.line or number for number, example in enumerate(examples, start=1)]
        has_pairs = (example.text_pair is not None for example in examples)
        require_all_or_none(has_pairs, lines, columns.text_pair, "second text")
        scores = (example.label is not None for example in examples)
        require_all_or_none(scores, lines, columns.label, "score")

    def recognizes_model(self, config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether sentence-transformers wrote the model."""
        return is_embedder

    def recognizes_graph(self, outputs: Set[str], config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether the graph returns embeddings, or hidden states with a known pooling."""
        return self.graph_output in outputs or (is_embedder and HIDDEN_STATES_OUTPUT in outputs)

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return texts or pairs with their scores, as `TaskSpec.encode`."""
        from smelt.tasks.samples import EncodedSample, encode_inputs

        sources, _ = encode_inputs(split, tokenizer, limit, self.name)
        # the ids of the second texts follow those of all first ones
        seconds: Sequence[list[int] | None] = sources.ids[len(split) :] or [None] * len(split)
        scores = [e.label if isinstance(e.label, float) else math.nan for e in split.examples]
        samples = [
            EncodedSample(ids, None, (score,), second)
            for ids, score, second in zip(sources.ids, scores, seconds, strict=False)
        ]
        return samples, sources.truncated

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> NDArray[np.float32]:
        """Return the embedding of each first text, float32 [n, D], as `TaskSpec.run`."""
        from smelt.runtimes.predict_texts import embed_texts

        texts = [example.text for example in examples]
        return embed_texts(runner, texts, batch_size, on_truncate=on_truncate)

    def predict(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
        top_k: int | None = None,
    ) -> Sequence[Any]:
        """Return the cosine similarity of each pair, and the embedding of each single text."""
        paired = [i for i, e in enumerate(examples) if e.text_pair is not None]
        seconds = [Example(str(examples[i].text_pair)) for i in paired]
        vectors = self.run(runner, [*examples, *seconds], generation, batch_size, on_truncate)
        results: list[list[float] | float] = [
            [round(float(x), 7) for x in vector] for vector in vectors[: len(examples)]
        ]
        cosines = paired_cosines(vectors[paired], vectors[len(examples) :])
        for i, cosine in zip(paired, cosines, strict=True):
            results[i] = float(cosine)
        return results

    def result_line(self, result: list[float] | float) -> str:
        """Return an embedding as JSON, and a similarity as a number."""
        return json.dumps(result) if isinstance(result, list) else f"{result:.4f}"

    def result_fields(self, result: list[float] | float) -> dict[str, Any]:
        """Return the embedding or the similarity."""
        return {"embedding" if isinstance(result, list) else "similarity": result}

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of samples with a text of more than `limit` tokens."""
        texts = [(i, text) for i, e in enumerate(split.examples) for text in (e.text, e.text_pair) if text]
        lengths = token_counts(tokenizer, [text for _, text in texts])
        return {i for (i, _), length in zip(texts, lengths, strict=True) if length > limit}


def paired_cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine of each row of `one` with the same row of `other`: [n, D], [n, D] -> [n].

    The cosine of a zero vector is set to 0.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dot_products = (a * b).sum(axis=1)
    cosines = np.divide(dot_products, lengths, out=np.zeros_like(dot_products), where=lengths > 0)
    return np.asarray(np.clip(cosines, -1, 1))


TASK = SentenceSimilarity()
