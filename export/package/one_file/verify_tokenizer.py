"""Compare a graph's tokenizer with the model's own on ten thousand generated texts and on edge cases.

A difference on a generated text rejects the graph. Edge cases (control characters, byte order marks, special
tokens that are spelled out, scripts that the model need not support) do not reject it; those that are
tokenized differently are listed for the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smelt.core.errors import InputError, MissingDependencyError
from smelt.export.package.one_file.synthetic_texts import SCRIPT_SAMPLES, synthetic_texts, vocabulary_words
from smelt.export.package.one_file.text_graph import TextPlan, detokenizer_graph, tokenizer_graph
from smelt.export.tokenizer.edge_case_texts import EDGE_CASE_TEXTS
from smelt.runtime.generate.prompt_batches import encode_prompts, truncate_prompt
from smelt.runtime.predict_texts import encode_texts
from smelt.runtime.text.length_limits import NO_LIMIT
from smelt.runtime.text.tokenizer import TextTokenizer

COMPARED_TEXTS = 10_000
_BATCH_SIZE = 200
_RANDOM_ROWS = 2_000  # random rows of ids, for decoding


def open_extensions_session(model: bytes | str) -> Any:
    """Open a graph that has operators of onnxruntime-extensions.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    import onnxruntime

    try:
        import onnxruntime_extensions
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime-extensions is not installed; it is required for string inputs. Install it with:"
            " pip install 'smelt[strings]' (or onnxruntime-extensions>=0.15)",
            code="not-installed",
        ) from error
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    options.log_severity_level = 4  # for edge cases it prints each text that an operator rejects
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def require_equal_tokens(
    plan: TextPlan, tokenizer: TextTokenizer, limit: int, vocabulary: int, eos: list[int] | None, causal: bool
) -> list[str]:
    """Require that the nodes of `plan` encode and decode as `tokenizer`; return edge cases that differ.

    Args:
        plan: the plan to compare.
        tokenizer: the model's own.
        limit: the maximum number of tokens of a text.
        vocabulary: tokens of the output layer.
        eos: ids of end tokens, for models that generate; else None.
        causal: whether texts are prompts.

    Raises:
        InputError: they differ; names the text.
        MissingDependencyError: onnxruntime-extensions is not installed.
    """
    session = open_extensions_session(tokenizer_graph(plan).SerializeToString())
    texts = synthetic_texts(vocabulary_words(tokenizer, vocabulary), COMPARED_TEXTS)
    expected = _reference_rows(texts, tokenizer, plan, limit, causal)
    found = _tokenize(session, texts)
    for text, ours, theirs in zip(texts, found, expected, strict=True):
        if ours != theirs:
            raise InputError(
                f"the operators of onnxruntime-extensions tokenize {text[:60]!r} differently",
                code="tokenizer-differs",
            )
    if eos is not None and plan.token_texts is not None:
        whole = encode_texts(texts, tokenizer, NO_LIMIT).ids  # a truncated text may end inside a character
        _require_equal_decoding(plan, tokenizer, whole, vocabulary, eos)
    others = [*EDGE_CASE_TEXTS, *SCRIPT_SAMPLES]
    wanted = _reference_rows(others, tokenizer, plan, limit, causal)
    return [text for text, row in zip(others, wanted, strict=True) if _tokenize_one(session, text) != row]


def _reference_rows(
    texts: Sequence[str], tokenizer: TextTokenizer, plan: TextPlan, limit: int, causal: bool
) -> list[list[int]]:
    if not causal:
        return encode_texts(texts, tokenizer, limit).ids
    most = plan.rows.max_text_tokens + len(plan.rows.prefix_tokens)
    whole = encode_prompts(texts, tokenizer, NO_LIMIT)
    return [truncate_prompt(ids, most, tokenizer.bos_token_id) for ids in whole]


def _tokenize(session: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text; none for a batch that the operators reject."""
    rows: list[list[int]] = []
    for at in range(0, len(texts), _BATCH_SIZE):
        part = texts[at : at + _BATCH_SIZE]
        try:
            ids, mask = session.run(None, {"texts": np.array(part, dtype=object)})
        except Exception as error:  # ONNX Runtime's errors share no other base class
            raise InputError(
                f"the operators of onnxruntime-extensions fail: {error}", code="tokenizer-failed"
            ) from error
        rows += [row[kept == 1].tolist() for row, kept in zip(ids, mask, strict=True)]
    return rows


def _tokenize_one(session: Any, text: str) -> list[int] | None:
    try:
        return _tokenize(session, [text])[0]
    except InputError:
        return None


def _require_equal_decoding(
    plan: TextPlan, tokenizer: TextTokenizer, rows: list[list[int]], vocabulary: int, eos: list[int]
) -> None:
    assert plan.token_texts is not None
    session = open_extensions_session(detokenizer_graph(plan.token_texts, eos).SerializeToString())
    given = [[token for token in row if token not in eos] for row in rows]
    if plan.token_texts.strip:  # random bytes are not characters
        usable = np.setdiff1d(np.arange(vocabulary), eos)
        given += np.random.default_rng(0).choice(usable, (_RANDOM_ROWS, 12)).tolist()
    expected = tokenizer.decode_batch(given)
    end = eos[0] if eos else 0
    for at in range(0, len(given), _BATCH_SIZE):
        part = given[at : at + _BATCH_SIZE]
        if eos:
            tokens = np.full((len(part), max(map(len, part)) + 1), end, dtype=np.int64)
            for row, ids in zip(tokens, part, strict=True):
                row[: len(ids)] = ids
            found = session.run(None, {"sequences": tokens})[0].tolist()
        else:
            found = [session.run(None, {"sequences": np.array([ids])})[0][0] for ids in part]
        for ours, theirs in zip(found, expected[at : at + _BATCH_SIZE], strict=True):
            if ours != theirs:
                raise InputError(
                    f"its tokens would be decoded as {ours[:60]!r} instead of {theirs[:60]!r}",
                    code="decoding-differs",
                )
