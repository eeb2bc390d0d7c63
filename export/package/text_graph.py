"""Build a graph from strings to strings, and compare its tokenizer with the model's own.

A tokenizer is inserted before the model's graph, and decoding after it. They are compared on ten thousand
generated texts, made from the tokens of the vocabulary and similar to real texts in its languages, and on
edge cases. A difference on a generated text rejects the graph. Edge cases (control characters, byte order
marks, special tokens that are spelled out, scripts that the model need not support) do not reject it; those
that are tokenized differently are listed for the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.core.errors import InputError, MissingDependencyError
from smelt.export.generation_graph.graph_builder import GraphBuilder, value_info
from smelt.export.package.text_nodes import (
    EXTENSIONS_DOMAIN,
    RowLayout,
    TokenizerNodes,
    TokenTexts,
    detokenize,
    pad_rows,
    string_constant,
)
from smelt.export.tokenizer import EDGE_CASE_TEXTS
from smelt.generation.config import MAX_NEW_TOKENS, GenerationConfig
from smelt.models.prompt_template import PROMPT_FIELD
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import (
    TextTokenizer,
    encode_prompts,
    encode_texts,
    truncate_prompt,
)

TEXTS_INPUT, GENERATED_OUTPUT, LABELS_OUTPUT, SEQUENCES_OUTPUT = "texts", "generated", "labels", "sequences"
_NAME_PREFIX = "text/"  # prefix of the names of all new values
_OPSET, _CONTRIB = 20, 1


@dataclass(frozen=True)
class TextPlan:
    """The nodes around a model's graph.

    tokenizer_nodes, rows: from texts to tokens. prefix: added before each text. lower: texts are lowercased.
    token_texts: from tokens to texts, for models that generate. labels: of a classifier's classes, if a text
    has one of them. template: the prompt template of a model whose output is a response; None for others.
    """

    tokenizer_nodes: TokenizerNodes
    rows: RowLayout
    prefix: str = ""
    lower: bool = False
    token_texts: TokenTexts | None = None
    labels: tuple[str, ...] = ()
    template: str | None = None


def tokenizer_graph(plan: TextPlan) -> Any:
    """Return an onnx.ModelProto from `texts` to only `input_ids` and `attention_mask`, for comparison."""
    b = GraphBuilder(first=_NAME_PREFIX)
    names = _add_tokenizer(b, plan)
    outputs = [value_info(name, np.int64, (None, None)) for name in names]
    return _make_model(b.graph("read", [_string_value_info(TEXTS_INPUT)], outputs))


def detokenizer_graph(surfaces: TokenTexts, eos: list[int]) -> Any:
    """Return an onnx.ModelProto from `sequences` to texts only, for comparison."""
    b = GraphBuilder(first=_NAME_PREFIX)
    texts = detokenize(b, SEQUENCES_OUTPUT, surfaces, eos)
    return _make_model(
        b.graph("write", [value_info(SEQUENCES_OUTPUT, np.int64, (None, None))], [_string_value_info(texts)])
    )


def text_graph(model: Any, plan: TextPlan, decoding: GenerationConfig | None, causal: bool) -> Any:
    """Return `model`, an onnx.ModelProto with its weights inside, with string inputs and outputs.

    Its previous outputs follow the strings.

    Args:
        model: of opset 20; it is changed.
        plan: the nodes around it.
        decoding: of models that generate.
        causal: whether it is a decoder-only model, whose sequences begin with the prompt.
    """
    graph = model.graph
    b = GraphBuilder(first=_NAME_PREFIX)
    ids, mask = _add_tokenizer(b, plan)
    computed_inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": b.op("Sub", ids, ids)}
    if causal and decoding is not None and decoding.max_new_tokens is None:
        computed_inputs["max_new_tokens"] = _max_new_tokens(b, b.dimension(ids, 1), decoding)
        _remove_named(graph.initializer, "max_new_tokens")
    inputs = [value for value in graph.input if value.name not in computed_inputs]
    bound_names = [value.name for value in graph.input if value.name in computed_inputs]
    for name in bound_names:
        b.nodes.append(_identity_node(computed_inputs[name], name))
    first = list(b.nodes)
    b.nodes.clear()
    outputs = _add_detokenizer(b, plan, decoding, ids if causal else None)
    nodes = [*first, *graph.node, *b.nodes]
    for field, values in (("node", nodes), ("input", [_string_value_info(TEXTS_INPUT), *inputs])):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    original_outputs = list(graph.output)
    graph.ClearField("output")
    graph.output.extend([*outputs, *original_outputs])
    graph.initializer.extend(b.initializers)
    model.opset_import.add(domain=EXTENSIONS_DOMAIN, version=_CONTRIB)
    return model


def _add_tokenizer(b: GraphBuilder, plan: TextPlan) -> tuple[str, str]:
    texts = TEXTS_INPUT if plan.template is None else _render(b, plan.template)
    if plan.prefix:
        texts = b.op("StringConcat", string_constant(b, plan.prefix), texts)
    if plan.lower:
        texts = b.op("StringLower", texts, domain=EXTENSIONS_DOMAIN)
    return pad_rows(b, *plan.tokenizer_nodes(b, texts), plan.rows)


def _render(b: GraphBuilder, template: str) -> str:
    """Return the texts in the place of each `{prompt}` of a template."""
    first, *remaining_parts = template.split(PROMPT_FIELD)
    rendered = b.op("StringConcat", string_constant(b, first), TEXTS_INPUT) if first else TEXTS_INPUT
    for field_index, part in enumerate(remaining_parts):
        rendered = b.op("StringConcat", rendered, TEXTS_INPUT) if field_index else rendered
        rendered = b.op("StringConcat", rendered, string_constant(b, part)) if part else rendered
    return rendered


def _add_detokenizer(
    b: GraphBuilder, plan: TextPlan, decoding: GenerationConfig | None, prompts: str | None
) -> list[Any]:
    """Append nodes that convert the model's outputs to strings; return the graph's new outputs."""
    if decoding is not None and plan.token_texts is not None:
        begin = b.const([1]) if prompts is None else b.op("Shape", prompts, start=1, end=2)
        new = b.op("Slice", SEQUENCES_OUTPUT, begin, b.const([2**31 - 1]), b.const([1]))
        text = detokenize(b, new, plan.token_texts, decoding.eos)
        if prompts is not None and plan.template is None:  # a continuation, not a response
            text = b.op("StringConcat", TEXTS_INPUT, text)
        b.nodes.append(_identity_node(text, GENERATED_OUTPUT))
        return [_string_value_info(GENERATED_OUTPUT)]
    if plan.labels:
        table = string_constant(b, *plan.labels)
        b.nodes.append(
            _identity_node(b.op("Gather", table, b.op("ArgMax", "logits", axis=1, keepdims=0)), LABELS_OUTPUT)
        )
        return [_string_value_info(LABELS_OUTPUT)]
    return []


def _max_new_tokens(b: GraphBuilder, length: str, decoding: GenerationConfig) -> str:
    """Return the number of new tokens after a prompt of `length` tokens, as `GenerationConfig` does."""
    max_new_tokens = b.const(MAX_NEW_TOKENS)
    if decoding.max_length is not None:
        remaining_length = b.op("Sub", b.const(decoding.max_length), length)
        max_new_tokens = b.op(
            "Where", b.op("Greater", remaining_length, b.const(0)), remaining_length, max_new_tokens
        )
    if decoding.positions is not None:
        max_new_tokens = b.op("Min", max_new_tokens, b.op("Sub", b.const(decoding.positions + 1), length))
    return b.op("Max", max_new_tokens, b.const(1))


def _string_value_info(name: str) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["batch_size"])


def _identity_node(value: str, name: str) -> Any:
    import onnx

    return onnx.helper.make_node("Identity", [value], [name], f"{_NAME_PREFIX}{name}.node")


def _remove_named(tensors: Any, name: str) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.name == name:
            del tensors[index]
            return


def _make_model(graph: Any) -> Any:
    from onnx import helper

    domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid(EXTENSIONS_DOMAIN, _CONTRIB)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


_SPECIAL_MARKS = ("<", "[", ">>", "\ufffd", "\x00")  # a special token may be spelled like this
_SEPARATORS = (" ",) * 24 + (", ", ", ", ". ", ". ", "; ", ": ", " - ", "-", "/", " & ", "  ", "\n")
_ENDINGS = (".",) * 6 + ("", "", "", "!", "?", "...", '"', ")", " ", "\n", "…", "%")
_EXTRA_WORDS = (
    "don't", "it's", "we've", "I'm", "O'Neill", "café", "naïve", "Äpfel", "straße", "Ærø", "Łódź", "señor",
    "1", "42", "1,234.56", "2024-05-17", "3rd", "50%", "€20", "$5", "#tag", "@name", "a.b@c.org", "C++",
    "x=y", "http://a.org/b?c=1", "“quoted”", "„so“", "it’s", "(see", "below)", "‘x’", "—", "–", "½", "№", "™",
)  # fmt: skip

# other scripts of the vocabulary are among its tokens already
SCRIPT_SAMPLES = (
    "привет, мир", "γειά σου", "你好 世界", "日本語 です", "한국어 문장", "नमस्ते दुनिया", "שלום עולם",
    "مرحبا بالعالم", "สวัสดี", "Tiếng Việt", "🙂 👍🏽",
)  # fmt: skip


def vocabulary_words(tokenizer: TextTokenizer, size: int) -> list[str]:
    """Return the texts of the tokens 0 .. `size` - 1, without special ones and incomplete characters."""
    word_texts = (
        text.replace("##", "").strip() for text in tokenizer.decode_batch([[i] for i in range(size)])
    )
    return sorted(
        {
            text
            for text in word_texts
            if text and not any(special_mark in text for special_mark in _SPECIAL_MARKS)
        }
    )


def synthetic_texts(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Return `count` different texts of 1 to 30 words, made of `words`, numbers, punctuation and accents."""
    random = np.random.default_rng(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[_random_text(words, random)] = None
    return list(texts)


def _random_text(words: Sequence[str], random: np.random.Generator) -> str:
    parts = [" "] if random.random() < 0.02 else []
    for _ in range(int(random.integers(1, 31))):
        word_list = _EXTRA_WORDS if random.random() < 0.06 or not words else words
        parts += [_random_case(word_list[int(random.integers(len(word_list)))], random.random())]
        parts += [_SEPARATORS[int(random.integers(len(_SEPARATORS)))]]
    return "".join(parts[:-1]) + _ENDINGS[int(random.integers(len(_ENDINGS)))]


def _random_case(text: str, drawn: float) -> str:
    return text.upper() if drawn < 0.05 else text.capitalize() if drawn < 0.2 else text


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
    graph_tokens = _tokenize(session, texts)
    for text, actual_row, expected_row in zip(texts, graph_tokens, expected, strict=True):
        if actual_row != expected_row:
            raise InputError(
                f"the operators of onnxruntime-extensions tokenize {text[:60]!r} differently",
                code="tokenizer-differs",
            )
    if eos is not None and plan.token_texts is not None:
        full_rows = encode_texts(
            texts, tokenizer, NO_LIMIT
        ).ids  # a truncated text may end inside a character
        _require_equal_decoding(plan, tokenizer, full_rows, vocabulary, eos)
    edge_cases = [*EDGE_CASE_TEXTS, *SCRIPT_SAMPLES]
    reference_rows = _reference_rows(edge_cases, tokenizer, plan, limit, causal)
    return [
        text
        for text, row in zip(edge_cases, reference_rows, strict=True)
        if _tokenize_one(session, text) != row
    ]


def _reference_rows(
    texts: Sequence[str], tokenizer: TextTokenizer, plan: TextPlan, limit: int, causal: bool
) -> list[list[int]]:
    if not causal:
        return encode_texts(texts, tokenizer, limit).ids
    max_tokens = plan.rows.max_text_tokens + len(plan.rows.prefix_tokens)
    full_prompts = encode_prompts(texts, tokenizer, NO_LIMIT)
    return [truncate_prompt(ids, max_tokens, tokenizer.bos_token_id) for ids in full_prompts]


def _tokenize(session: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text; none for a batch that the operators reject."""
    token_rows: list[list[int]] = []
    for start in range(0, len(texts), _BATCH_SIZE):
        part = texts[start : start + _BATCH_SIZE]
        try:
            ids, mask = session.run(None, {"texts": np.array(part, dtype=object)})
        except Exception as error:  # ONNX Runtime's errors share no other base class
            raise InputError(
                f"the operators of onnxruntime-extensions fail: {error}", code="tokenizer-failed"
            ) from error
        token_rows += [row[row_mask == 1].tolist() for row, row_mask in zip(ids, mask, strict=True)]
    return token_rows


def _tokenize_one(session: Any, text: str) -> list[int] | None:
    try:
        return _tokenize(session, [text])[0]
    except InputError:
        return None


def _require_equal_decoding(
    plan: TextPlan, tokenizer: TextTokenizer, token_rows: list[list[int]], vocabulary: int, eos: list[int]
) -> None:
    assert plan.token_texts is not None
    session = open_extensions_session(detokenizer_graph(plan.token_texts, eos).SerializeToString())
    clean_rows = [[token for token in row if token not in eos] for row in token_rows]
    if plan.token_texts.strip:  # random bytes are not characters
        usable = np.setdiff1d(np.arange(vocabulary), eos)
        clean_rows += np.random.default_rng(0).choice(usable, (_RANDOM_ROWS, 12)).tolist()
    expected = tokenizer.decode_batch(clean_rows)
    end = eos[0] if eos else 0
    for start in range(0, len(clean_rows), _BATCH_SIZE):
        part = clean_rows[start : start + _BATCH_SIZE]
        if eos:
            tokens = np.full((len(part), max(map(len, part)) + 1), end, dtype=np.int64)
            for row, ids in zip(tokens, part, strict=True):
                row[: len(ids)] = ids
            decoded = session.run(None, {"sequences": tokens})[0].tolist()
        else:
            decoded = [session.run(None, {"sequences": np.array([ids])})[0][0] for ids in part]
        for actual_text, expected_text in zip(decoded, expected[start : start + _BATCH_SIZE], strict=True):
            if actual_text != expected_text:
                raise InputError(
                    f"its tokens would be decoded as {actual_text[:60]!r} instead of {expected_text[:60]!r}",
                    code="decoding-differs",
                )
