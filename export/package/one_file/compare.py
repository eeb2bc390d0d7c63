"""Whether a graph's tokenizer is the model's own: both on ten thousand texts by rule, and on awkward ones.

A difference on a text by rule refuses the graph. Awkward texts (controls, byte order marks, special tokens
that are spelled out, scripts that the model need not know) are no reason to refuse it; those that are read
otherwise are told to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smelt.core.errors import InputError, MissingDependencyError
from smelt.export.package.one_file.made_up_texts import SCRIPTS, made_up_texts, words_of
from smelt.export.package.one_file.text_graph import TextPlan, reading_graph, writing_graph
from smelt.export.tokenizer.awkward_texts import AWKWARD
from smelt.runtime.generate.prompts import cut_prompt, encode_prompts
from smelt.runtime.predict import encode_texts
from smelt.runtime.text.limits import NO_LIMIT
from smelt.runtime.text.tokenizer import TextTokenizer

TEXTS = 10_000
_AT_ONCE = 200
_DRAWN = 2_000  # rows of ids drawn at random, for the way back


def open_session(model: bytes | str) -> Any:
    """Open a graph that has operators of onnxruntime-extensions.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    import onnxruntime

    try:
        import onnxruntime_extensions
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime-extensions is not installed; with it the file takes strings:"
            " pip install 'smelt[strings]' (or onnxruntime-extensions>=0.15)",
            code="not-installed",
        ) from error
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    options.log_severity_level = 4  # of awkward texts it prints each that an operator does not take
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def require_same(
    plan: TextPlan, tokenizer: TextTokenizer, limit: int, vocabulary: int, eos: list[int] | None, causal: bool
) -> list[str]:
    """Require that the nodes of `plan` read and write as `tokenizer`; return awkward texts it does not.

    Args:
        plan: what is to be compared.
        tokenizer: the model's own.
        limit: the most tokens of a text.
        vocabulary: tokens of the output layer.
        eos: ids that end a text, of models that generate; else None.
        causal: whether texts are prompts.

    Raises:
        InputError: they differ; names the text.
        MissingDependencyError: onnxruntime-extensions is not installed.
    """
    session = open_session(reading_graph(plan).SerializeToString())
    texts = made_up_texts(words_of(tokenizer, vocabulary), TEXTS)
    expected = _rows(texts, tokenizer, plan, limit, causal)
    found = _read(session, texts)
    for text, ours, theirs in zip(texts, found, expected, strict=True):
        if ours != theirs:
            raise InputError(
                f"the operators of onnxruntime-extensions read {text[:60]!r} otherwise",
                code="tokenizer-differs",
            )
    if eos is not None and plan.surfaces is not None:
        whole = encode_texts(texts, tokenizer, NO_LIMIT).ids  # what is cut may end inside of a letter
        _require_same_texts(plan, tokenizer, whole, vocabulary, eos)
    others = [*AWKWARD, *SCRIPTS]
    wanted = _rows(others, tokenizer, plan, limit, causal)
    return [text for text, row in zip(others, wanted, strict=True) if _try(session, text) != row]


def _rows(
    texts: Sequence[str], tokenizer: TextTokenizer, plan: TextPlan, limit: int, causal: bool
) -> list[list[int]]:
    if not causal:
        return encode_texts(texts, tokenizer, limit).ids
    most = plan.rows.room + len(plan.rows.before)
    whole = encode_prompts(texts, tokenizer, NO_LIMIT)
    return [cut_prompt(ids, most, tokenizer.bos_token_id) for ids in whole]


def _read(session: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text; of a batch that the operators cannot read none at all."""
    rows: list[list[int]] = []
    for at in range(0, len(texts), _AT_ONCE):
        part = texts[at : at + _AT_ONCE]
        try:
            ids, mask = session.run(None, {"texts": np.array(part, dtype=object)})
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise InputError(
                f"the operators of onnxruntime-extensions fail: {error}", code="tokenizer-failed"
            ) from error
        rows += [row[kept == 1].tolist() for row, kept in zip(ids, mask, strict=True)]
    return rows


def _try(session: Any, text: str) -> list[int] | None:
    try:
        return _read(session, [text])[0]
    except InputError:
        return None


def _require_same_texts(
    plan: TextPlan, tokenizer: TextTokenizer, rows: list[list[int]], vocabulary: int, eos: list[int]
) -> None:
    assert plan.surfaces is not None
    session = open_session(writing_graph(plan.surfaces, eos).SerializeToString())
    given = [[token for token in row if token not in eos] for row in rows]
    if plan.surfaces.strip:  # bytes that are drawn are no letters
        usable = np.setdiff1d(np.arange(vocabulary), eos)
        given += np.random.default_rng(0).choice(usable, (_DRAWN, 12)).tolist()
    expected = tokenizer.decode_rows(given)
    end = eos[0] if eos else 0
    for at in range(0, len(given), _AT_ONCE):
        part = given[at : at + _AT_ONCE]
        if eos:
            tokens = np.full((len(part), max(map(len, part)) + 1), end, dtype=np.int64)
            for row, ids in zip(tokens, part, strict=True):
                row[: len(ids)] = ids
            found = session.run(None, {"sequences": tokens})[0].tolist()
        else:
            found = [session.run(None, {"sequences": np.array([ids])})[0][0] for ids in part]
        for ours, theirs in zip(found, expected[at : at + _AT_ONCE], strict=True):
            if ours != theirs:
                raise InputError(
                    f"its tokens would be put together as {ours[:60]!r}, not {theirs[:60]!r}",
                    code="decoding-differs",
                )
