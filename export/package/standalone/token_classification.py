"""Entities of texts with onnxruntime, numpy and tokenizers: python infer.py "TEXT", or lines on stdin."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.classes import CONTROLS
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.json_values import read_text
from smelt.export.package.standalone.session import open_graph, run_command_line

OUTSIDE = "O"
PREFIXED = re.compile(r"([BIESLU])-(.+)", re.DOTALL)  # B-PER: prefix and type
# of scripts without spaces between words, each character is a word
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Myanmar}\p{Khmer}]"


def word_splitter() -> Any:
    """Return the splitter of texts into words: at spaces, each punctuation mark a word."""
    unspaced = tokenizers.pre_tokenizers.Split(tokenizers.Regex(UNSPACED), "isolated")
    return tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.BertPreTokenizer(), unspaced])


def tag_prefixes(labels: list[str]) -> str:
    """Return the prefixes of tags: E and S, L and U only if a type has one and B or I."""
    pairs = {(match[1], match[2]) for label in labels if (match := PREFIXED.fullmatch(label))}
    types = {label for prefix, label in pairs if prefix in "BI"}
    shown = {prefix for prefix, label in pairs if label in types}
    return "BI" * bool(types) + "".join(letters for letters in ("ES", "LU") if shown.intersection(letters))


def tagged_spans(tags: list[str], prefixes: str, joins: bool) -> list[tuple[int, int, str]]:
    """Return the first word, the end and the type of each entity; joins: a tag without prefix is as I-."""
    entities: list[tuple[int, int, str]] = []
    ends_before, label_before = True, ""
    for index, tag in enumerate(tags):
        match = PREFIXED.fullmatch(tag)
        if match and match[1] in prefixes:
            prefix, label = match[1], match[2]
        else:
            prefix, label = "I" if joins else "S", tag
        if tag == OUTSIDE:
            ends_before, label_before = True, ""
            continue
        if ends_before or prefix in "BSU" or label != label_before:
            entities.append((index, index + 1, label))
        else:
            entities[-1] = (entities[-1][0], index + 1, label)
        ends_before, label_before = prefix in "ESLU", label
    return entities


class Tagger:
    """Tagger(folder)(texts) -> the entities of each text, or of each list of words. Thread-safe.

    `threads` is per call. The text of a list of words is the words joined with spaces.

    An entity is a dict: `entity_group` (its type), `word` (its text), `start` and `end` (characters, end
    exclusive), `score` (the mean probability of its words). `cut` counts truncated texts.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.labels, self.settings, self.cut = config["labels"], config["tokenizer"], 0
        self.spaces_words = config["spaces_words"]
        self.prefixes = tag_prefixes(self.labels)
        self.joins = OUTSIDE in self.labels or bool(self.prefixes)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        if self.settings["limit"] is not None:
            side = self.settings["truncation_side"]
            self.tokenizer.enable_truncation(self.settings["limit"], direction=side)
        self.splitter = word_splitter()
        self.graph = open_graph(
            Path(folder) / "model.onnx", threads or config["threads"], pad=config["tokenizer"]["pad"]
        )
        self.inputs = {value.name for value in self.graph.get_inputs()}

    def __call__(
        self, texts: Iterable[str | Sequence[str]], batch_size: int = 32
    ) -> list[list[dict[str, Any]]]:
        """Return the entities of each text, in their order."""
        items = [(item, self.word_offsets(item)) for item in texts]
        joined = [item if isinstance(item, str) else " ".join(item) for item, _ in items]
        offsets = [spans for _, spans in items]
        encoded = [self.encode(text, spans) for text, spans in zip(joined, offsets, strict=True)]
        answers: list[list[dict[str, Any]]] = [[] for _ in joined]
        rows = [list(encoding.ids) for encoding in encoded]
        for indices, ids, mask in length_batches(rows, self.settings["pad"], batch_size):
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            feeds = {name: value for name, value in feeds.items() if name in self.inputs}
            logits = self.graph.run(["logits"], feeds)[0]
            for i, text_logits in zip(indices, logits, strict=True):
                answers[i] = self.entities(joined[i], offsets[i], encoded[i].word_ids, text_logits)
        return answers

    def from_json(self, value: Any) -> str | list[str]:
        """Return the text or the words of a JSON value; raise ValueError if it is neither."""
        if not isinstance(value, list):
            return read_text(value, "a text or a list of its words")
        words = [read_text(item) for item in value]
        if not all(text.strip() for text in words):
            raise ValueError("a word is empty. Remove it")
        return words

    def word_offsets(self, item: str | Sequence[str]) -> list[tuple[int, int]]:
        """Return start and end of the words of a text, or of words joined with spaces."""
        if isinstance(item, str):
            return [span for _, span in self.splitter.pre_tokenize_str(item)]
        ends = list(itertools.accumulate(len(name) + 1 for name in item))
        return [(end - len(name) - 1, end - 1) for name, end in zip(item, ends, strict=True)]

    def encode(self, text: str, offsets: list[tuple[int, int]]) -> Any:
        """Return the tokens of the words of `text`."""
        words = [
            text[start:end].lower() if self.settings["lower"] else text[start:end] for start, end in offsets
        ]
        if self.spaces_words:  # the space before a word belongs to its first token
            words = [f" {name}" for name in words]
        encoding = self.tokenizer.encode(words or [""], is_pretokenized=True)
        self.cut += bool(encoding.overflowing)
        return encoding

    def entities(
        self, text: str, offsets: list[tuple[int, int]], word_ids: list[int | None], logits: Any
    ) -> list[dict[str, Any]]:
        """Return the entities of one text; logits: float32 [L, C], word_ids: the word of each token."""
        tags, scores = [OUTSIDE] * len(offsets), [0.0] * len(offsets)
        read: set[int] = set()
        for position, index in enumerate(word_ids):
            if index is None or index in read or index >= len(offsets):
                continue
            read.add(index)
            values = finite_outputs(logits[position]).astype(np.float64)
            odds = np.exp(values - values.max())
            tags[index], scores[index] = self.labels[int(odds.argmax())], float(odds.max() / odds.sum())
        return [
            {
                "entity_group": label,
                "score": float(np.mean(scores[first:end])),
                "word": text[offsets[first][0] : offsets[end - 1][1]],
                "start": offsets[first][0],
                "end": offsets[end - 1][1],
            }
            for first, end, label in tagged_spans(tags, self.prefixes, self.joins)
        ]


def answer_lines(model: Tagger, texts: list[str]) -> list[str]:
    """Return for each text its entities, `word [type start:end score]`, separated by tabs."""
    lines = []
    for entities in model(texts):
        names = [(e["word"].translate(CONTROLS), e["entity_group"].translate(CONTROLS)) for e in entities]
        details = [f"{e['start']}:{e['end']} {e['score']:.3f}" for e in entities]
        parts = zip(names, details, strict=True)
        lines.append("\t".join(f"{name} [{label} {detail}]" for (name, label), detail in parts))
    return lines


if __name__ == "__main__":
    run_command_line(Tagger, answer_lines, __doc__)
