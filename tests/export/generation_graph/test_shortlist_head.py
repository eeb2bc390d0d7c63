"""The loop with a shortlist says what the loop in Python says that hides the other words."""

import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import RunError
from smelt.core.files import read_json_object
from smelt.export.generation_graph.graph_builder import GraphBuilder, GraphLevel, hoist_nodes, value_info
from smelt.export.generation_graph.step_model import ShortlistHead
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.generation.config import (
    GenerationSettings,
    make_shortlist,
    resolve_generation,
    vocabulary_sizes,
    write_shortlist,
)
from smelt.generation.search import generate_in_graph, generate_resolved
from smelt.quantization.schemes.registry import SCHEMES
from smelt.runtimes.onnx_session import session_options
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.graphs.ort_sessions import HAS_NO_VNNI
from tests.support.models import every_family
from tests.support.pairs import matrix
from tests.support.shared_folders import make_once

FORCED = 7  # on no list
WISHES = (
    {}, {"num_beams": 3}, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {"num_beams": 2, "no_repeat_ngram_size": 2}, {"forced_bos_token_id": FORCED},
    {"num_beams": 2, "forced_bos_token_id": FORCED, "min_new_tokens": 3},
)  # fmt: skip
# relative positions, and each way to make logits: Gemm, codes by columns and by groups
# and one whose output layer unpacks its weights with the other layers' table
CELLS = [
    ("t5", None),
    ("marian", "int8-dynamic"),
    ("bart", "binary"),
    ("marian", "int4"),
    ("marian", "ternary"),
]
if matrix.is_full_matrix():
    CELLS += [
        ("mbart", None),
        ("marian", None),
        ("bart", None),
        ("pegasus", None),
        ("m2m_100", None),
        ("t5", "int8-static"),
    ]


def listed(family, folder):
    """Copy a tiny model and give it a list of three random words for each; return the folder."""
    shutil.copytree(every_family.model_with_layers(family, 2), folder)
    config = read_json_object(folder / "config.json")
    sources, targets = vocabulary_sizes(config)
    table = np.random.default_rng(0).integers(FORCED + 1, targets, (sources, 3))
    write_shortlist(make_shortlist(table, np.array([config["eos_token_id"], 5]), targets), folder)
    return folder


def exported(family, scheme):
    """Return the graphs of `listed` in a scheme, and the model that they are made of; made once."""
    root = make_once(f"listed-{family}-{scheme}", lambda folder: _export(family, scheme, folder))
    return root / "graphs", root / ("codes" if scheme else "model")


def _export(family, scheme, space):
    space.mkdir()
    source = listed(family, space / "model")
    if scheme:
        head_scheme = scheme if family == "marian" else None  # else the scheme's own choice
        settings = QuantizeSettings(scheme=scheme, embedding_scheme=head_scheme)
        source = every_family.run_stage(Quantize(), settings, source, family, space / "codes").out
    every_family.run_stage(Onnx(), OnnxSettings(), source, family, space / "graphs")


def batch(rows, words, seed):
    draw = np.random.default_rng(seed)
    ids, mask = draw.integers(4, words, (rows, 9)), np.ones((rows, 9), np.int64)
    for row in range(1, rows):
        mask[row, 9 - row :] = 0
    return Batch(ids, mask)


@pytest.mark.parametrize(("family", "scheme"), CELLS)
def test_generation_graph_equals_python_loop(family, scheme):
    if HAS_NO_VNNI and scheme in ("int8-dynamic", "int8-static", "binary"):
        pytest.skip("without VNNI ONNX Runtime's products with gathered codes are not exact")
    graphs, source = exported(family, scheme)
    tokens_seen = set()
    with open_folder(graphs, "onnx", "ort-cpu", 1) as runner, open_folder(source, "torch", None, 1) as torch:
        vocabulary_size, vocabulary = vocabulary_sizes(runner.config)
        calls = []
        original = runner.generate_sequences
        runner.generate_sequences = lambda *args: calls.append(args) or original(*args)
        for batch_size in (1, 6):
            inputs = batch(batch_size, vocabulary_size, batch_size)
            allowed = runner.shortlist.allowed_tokens(inputs, vocabulary)
            for generation in WISHES:
                decoding = resolve_generation(GenerationSettings(max_new_tokens=9, **generation), runner)
                generated = generate_in_graph(runner, inputs, decoding)
                assert generated == generate_resolved(runner, inputs, decoding), generation
                if scheme is None:  # of codes torch may round an activation to another one
                    assert generated == generate_resolved(torch, inputs, decoding), generation
                unrestricted = {FORCED, decoding.forced_bos_token_id, *decoding.forced_eos_token_id}
                for row, text in enumerate(generated):
                    assert all(allowed[row, token] or token in unrestricted for token in text)
                    tokens_seen |= set(text) - unrestricted
        assert len(calls) == 2 * len(WISHES)
        assert len(tokens_seen) >= 5, "hardly any words came: the test shows nothing"


def loop_products(graph, level=0):
    """Yield each product of packed weights inside a loop, and whether its weights are that graph's own."""
    producers = {name: node for node in graph.node for name in node.output}
    local_names = {tensor.name for tensor in graph.initializer}

    def is_own(name):
        node = producers.get(name)
        return name in local_names if node is None else all(is_own(source) for source in node.input if source)

    for node in graph.node:
        if node.op_type == "MatMulNBits" and level:
            yield node, all(is_own(name) for name in node.input[1:] if name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from loop_products(attribute.g, level + 1)


PACKED_SCHEMES = ["int4", "ternary", "kmeans4"]
if matrix.is_full_matrix():
    PACKED_SCHEMES = [
        name
        for name, scheme in SCHEMES.items()
        if scheme.supports_shortlist and scheme.operators == ("MatMulNBits",)
    ]


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
def test_loop_has_its_own_packed_weights(scheme):
    graphs, _ = exported("marian", scheme)
    for name in ("generate", "generate_beams"):
        model = onnx.load(graphs / f"{name}.onnx", load_external_data=False)
        products = list(loop_products(model.graph))
        assert len(products) == 12, name
        assert [node.name for node, is_own in products if not is_own] == [], name


def test_row_result_does_not_depend_on_batch():
    graphs, _ = exported("marian", None)
    with open_folder(graphs, "onnx", "ort-cpu", 1) as runner:
        inputs = batch(6, vocabulary_sizes(runner.config)[0], 3)
        for beams in (1, 3):
            decoding = resolve_generation(GenerationSettings(max_new_tokens=9, num_beams=beams), runner)
            together = generate_in_graph(runner, inputs, decoding)
            for row, text in enumerate(together):
                single_row = Batch(inputs.input_ids[row : row + 1], inputs.attention_mask[row : row + 1])
                assert generate_in_graph(runner, single_row, decoding) == [text]


@pytest.mark.parametrize("graph", ["generate", "generate_beams"])
def test_empty_batch_returns_empty_sequences(graph):
    folder, _ = exported("marian", "int4")
    session = onnxruntime.InferenceSession(folder / f"{graph}.onnx", session_options(1))
    none = np.zeros((0, 5), np.int64)
    (sequences,) = session.run(["sequences"], {"input_ids": none, "attention_mask": none})
    assert sequences.shape == (0, 1)


def test_shortlist_table_is_stored_once():
    graphs, _ = exported("marian", None)
    for name in ("generate", "generate_beams"):
        model = onnx.load(graphs / f"{name}.onnx", load_external_data=False)
        [table] = [t for t in model.graph.initializer if t.name == "shortlist.table"]
        external_data = {e.key: e.value for e in table.external_data}
        if external_data:  # a small one lies in the graph
            assert external_data["location"] == "shortlist.safetensors"


K, V = 40, 12
X = np.random.default_rng(1).normal(size=(3, K)).astype(np.float32)
WORDS = np.array([0, 3, 4, 11])


def head(nodes, tensors):
    """Return what a head gives for all words and for `WORDS`."""
    graph = helper.make_graph(
        nodes, "step", [value_info("x", np.float32, (None, K))],
        [value_info("logits", np.float32, (None, V))],
        [numpy_helper.from_array(t, n) for n, t in tensors.items()],
    )  # fmt: skip
    b = GraphBuilder()
    shortlist_head = ShortlistHead(graph)
    assert not any("logits" in node.output for node in shortlist_head.rest.node)
    level = GraphLevel(b, {"x": "x"})
    hoist_nodes(shortlist_head.rest, [level], "")  # what comes before the product
    shortlist_head.gather_weights(level, "words")
    logits = shortlist_head.shortlist_logits(b, level.names.get(shortlist_head.states, shortlist_head.states))
    b.nodes.append(helper.make_node("Identity", [logits], ["few"]))
    inputs = [value_info("x", np.float32, (None, K)), value_info("words", np.int64, (None,))]
    short_graph = b.graph("few", inputs, [value_info("few", np.float32, (None, None))])
    return _run(graph, {"x": X}), _run(short_graph, {"x": X, "words": WORDS})


def _run(graph, feeds):
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)[0]


DRAW = np.random.default_rng(2)
FLOATS = DRAW.normal(size=(V, K)).astype(np.float32)
CODES = DRAW.integers(-127, 128, (K, V)).astype(np.int8)
SCALES, BIAS = (DRAW.uniform(0.5, 1, V).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("form", "scales"), [
    *((form, SCALES) for form in ("Gemm", "Gemm by columns", "MatMul", "DynamicQuantizeMatMul", "Integer")),
    *((form, SCALES[0]) for form in ("DynamicQuantizeMatMul", "Integer")),  # one for the whole matrix
])  # fmt: skip
def test_shortlist_logits_equal_full_logits(form, scales, bias):
    if HAS_NO_VNNI and form in ("DynamicQuantizeMatMul", "Integer"):
        pytest.skip("without VNNI ONNX Runtime's products with gathered codes are not exact")
    microsoft = {"domain": "com.microsoft"}
    bias_inputs = ["bias"] if bias else []
    tensors = {"bias": BIAS} if bias else {}
    if form.startswith("Gemm"):
        is_transposed = form == "Gemm"
        tensors |= {"w": FLOATS if is_transposed else np.ascontiguousarray(FLOATS.T)}
        nodes = [helper.make_node("Gemm", ["x", "w", *bias_inputs], ["logits"], transB=int(is_transposed))]
    elif form == "MatMul":
        tensors |= {"w": CODES, "s": scales}
        nodes = [
            helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["f", "s"], ["m"]),
            helper.make_node("MatMul", ["x", "m"], ["product" if bias else "logits"]),
        ]
        nodes += [helper.make_node("Add", ["product", "bias"], ["logits"])] if bias else []
    elif form == "DynamicQuantizeMatMul":
        tensors |= {"w": CODES, "s": scales}
        nodes = [
            helper.make_node(form, ["x", "w", "s", *(["", "bias"] if bias else [])], ["logits"], **microsoft)
        ]
    else:
        tensors |= {"w": CODES, "s": scales, "a": np.float32(0.02), "z": np.uint8(128)}
        inputs = ["q", "w", "a", "s", "z", *(["", "bias"] if bias else [])]
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "a", "z"], ["q"]),
            helper.make_node("MatMulIntegerToFloat", inputs, ["logits"], **microsoft),
        ]
    all_logits, short_logits = head(nodes, tensors)
    tolerance = 0 if form == "DynamicQuantizeMatMul" else 1e-5 * float(np.abs(all_logits).max())
    np.testing.assert_allclose(short_logits, all_logits[:, WORDS], rtol=0, atol=tolerance)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("size", [16, 32])
def test_grouped_weights_and_rounded_activations_match_operator(size, level, zeros):
    groups = -(-K // size)
    random = np.random.default_rng(3)
    tensors = {
        "w": random.integers(0, 256, (V, groups, size // 2)).astype(np.uint8),
        "s": random.uniform(0.5, 1, (V, groups)).astype(np.float32),
        "z": random.integers(0, 256, (V, -(-groups // 2))).astype(np.uint8),
        "bias": BIAS,
    }
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s", "z" if zeros else "", "", "bias"], ["logits"], domain="com.microsoft",
        K=K, N=V, bits=4, block_size=size, accuracy_level=level,
    )  # fmt: skip
    all_logits, short_logits = head([node], tensors)
    np.testing.assert_allclose(
        short_logits, all_logits[:, WORDS], rtol=0, atol=2e-5 * float(np.abs(all_logits).max())
    )


def test_unsupported_head_error_names_operator():
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["logits"])], "step", [], [])
    with raises_code("unsupported-graph", RunError) as excinfo:
        ShortlistHead(graph)
    assert "step: " in str(excinfo.value)
    assert "Softmax" in str(excinfo.value)
