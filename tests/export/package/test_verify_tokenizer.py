"""The comparison of a graph's tokenizer with the model's own sees what is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.export.package import text_graph
from smelt.export.package.one_file_format import generation_config_of, make_text_plan
from smelt.export.package.text_graph import (
    _ENDINGS,
    _EXTRA_WORDS,
    _SEPARATORS,
    SCRIPT_SAMPLES,
    detokenizer_graph,
    synthetic_texts,
)
from smelt.export.package.text_nodes import TokenTexts
from smelt.models.tokenizer import open_tokenizer
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts

pytest.importorskip("onnxruntime_extensions", reason="pip install onnxruntime-extensions")


def compared(folder: Path, plan: Any, eos: list[int] | None, causal: bool = False) -> list[str]:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return text_graph.require_equal_tokens(plan, open_tokenizer(folder), 40, vocabulary, eos, causal)


@pytest.fixture
def translator(monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any, list[int]]:
    monkeypatch.setattr(text_graph, "COMPARED_TEXTS", 100)
    folder = exported_artifacts.exported_artifact("translator")
    decoding = generation_config_of(folder, {})
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return folder, make_text_plan(folder, decoding, vocabulary), decoding.eos


def test_correct_tokenizer_passes_and_edge_cases_are_listed(translator: Any) -> None:
    assert ">>deu<< text" in compared(*translator)


@pytest.mark.parametrize(
    "change", [{"suffix_tokens": ()}, {"max_text_tokens": 20}, {"prefix_tokens": (3,)}, {"keep_end": True}]
)
def test_different_truncation_or_ending_is_detected(translator: Any, change: dict[str, Any]) -> None:
    folder, plan, eos = translator
    wrong = dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, **change))
    with raises_code("tokenizer-differs", InputError):
        compared(folder, wrong, eos)


def test_missing_prefix_is_detected(translator: Any) -> None:
    folder, plan, eos = translator
    with raises_code("tokenizer-differs", InputError):
        compared(folder, dataclasses.replace(plan, prefix="a "), eos)


def test_different_token_is_detected(translator: Any) -> None:
    folder, plan, eos = translator
    table = (*plan.token_texts.table[:20], b"x", *plan.token_texts.table[21:])
    with raises_code("decoding-differs", InputError):
        compared(
            folder,
            dataclasses.replace(plan, token_texts=dataclasses.replace(plan.token_texts, table=table)),
            eos,
        )


@pytest.mark.parametrize("cased", [False, True])
def test_bert_normalization_of_all_scripts_equals_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cased: bool
) -> None:
    """Letters of all scripts, and what they become, are in the vocabulary also as continuations."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    from smelt.models.tokenizer import TokenizerInfo, write_tokenizer_info

    monkeypatch.setattr(text_graph, "COMPARED_TEXTS", 300)
    bert = normalizers.BertNormalizer(lowercase=not cased)
    texts = [
        text
        for sample in (*SCRIPT_SAMPLES, *_EXTRA_WORDS, *_ENDINGS, *_SEPARATORS)
        for text in (sample, sample.upper())
    ]
    characters = sorted({c for text in texts for c in text + bert.normalize_str(text) if not c.isspace()})
    characters = sorted({*characters, *"ŚśniegΟΔΌΣοδόςσ", *bert.normalize_str("Śnieg ΟΔΌΣ")} - {" "})
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *characters,
        *(f"##{c}" for c in characters),
        "Śnieg",
        "ΟΔΌΣ",
    ]
    inner = Tokenizer(
        models.WordPiece(
            {vocabulary_token: i for i, vocabulary_token in enumerate(vocabulary)}, unk_token="[UNK]"
        )
    )
    inner.normalizer, inner.pre_tokenizer = bert, pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.save(str(tmp_path / "tokenizer.json"))
    write_tokenizer_info(tmp_path, TokenizerInfo(reader="tokenizers", longest=40, pad=0, types=True))
    config = {"model_type": "bert", "vocab_size": len(vocabulary), "id2label": {"0": "a", "1": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    differing = compared(tmp_path, make_text_plan(tmp_path, None, len(vocabulary)), None)
    assert not {"한국어 문장", "привет, мир", "γειά σου"} & set(differing)


def test_invalid_bytes_become_replacement_character() -> None:
    """As `bytes.decode` has it, but for how many signs stand for several bytes in a row."""
    surfaces = TokenTexts((*(bytes([byte]) for byte in range(256)), b""), strip=False)
    session = text_graph.open_extensions_session(detokenizer_graph(surfaces, []).SerializeToString())
    random = np.random.default_rng(0)
    token_rows = [*random.integers(1, 256, (200, 12)), *random.integers(0x80, 256, (200, 12))]
    token_rows += [
        np.frombuffer(b, dtype=np.uint8) for b in (b"\xf4\x90\x80\x80", b"\xed\xa0\x80", "é漢🙂".encode())
    ]
    for row in token_rows:
        decoded = session.run(None, {"sequences": row[None].astype(np.int64)})[0][0]
        assert re.sub("\ufffd+", "\ufffd", decoded) == re.sub(
            "\ufffd+", "\ufffd", row.astype(np.uint8).tobytes().decode("utf-8", "replace")
        )


@pytest.mark.quick
def test_generated_texts_are_deterministic_and_distinct() -> None:
    texts = synthetic_texts(["one", "two"], 500)
    assert len(set(texts)) == 500
    assert texts == synthetic_texts(["one", "two"], 500)
