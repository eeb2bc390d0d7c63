"""Encoders compute real tokens only: what the products read, and that results do not change."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from smelt.export.generation_graph.write import write_generation_graphs
from smelt.export.parity.check_parity import check_exported_graphs
from smelt.export.remove_padding import remove_padding
from smelt.models.checkpoint import load_model
from smelt.runtimes.registry import open_folder
from tests.support.graphs.graph_exports import exported_graphs
from tests.support.models import generation_models

PRODUCTS = {"MatMul", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulNBits", "MatMulIntegerToFloat"}
# of each way in which an encoder computes one
ENCODERS = [
    ("marian", "fp32"), ("marian", "int8"), ("marian", "static"), ("marian", "int4"), ("t5", "fp32"),
    ("bert", "fp32"), ("bert", "int8"), ("modernbert", "fp32"), ("albert", "fp32"), ("embedder", "fp32"),
]  # fmt: skip
BATCH, LENGTH, WIDTH = 3, 5, 4
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])


@pytest.mark.parametrize(("family", "scheme"), ENCODERS)
def test_exported_encoder_multiplies_real_tokens_only(family, scheme):
    exported = exported_graphs(family, scheme)
    graph = exported.subject.graphs[0]
    model = onnx.load(exported.folder / f"{graph.name}.onnx")
    initializers = {tensor.name for tensor in model.graph.initializer}
    names = [node.input[0] for node in model.graph.node if node.op_type in PRODUCTS]
    names = [name for name in dict.fromkeys(names) if name not in initializers]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6])
    inputs = {name: np.ones_like(mask) for name in graph.input_names} | {"attention_mask": mask}
    row_counts = [np.prod(value.shape[:-1]) for value in session.run(None, inputs)]
    pooled = [count for count in row_counts if count == len(mask)]  # a head over one vector a text
    assert len(row_counts) - len(pooled) >= 4
    assert set(row_counts) <= {mask.sum(), len(mask)}


# of a Marian some activations lie between two codes; with padding in the ranges of torch it is 0.013
@pytest.mark.parametrize(("family", "largest"), [("albert", 1e-5), ("bert", 1e-5), ("marian", 4e-3)])
def test_int8_encoder_equals_torch_as_deployed(family, largest):
    """The ranges of both are those of a text alone."""
    exported = exported_graphs(family, "int8")
    assert not exported.reference.batch.attention_mask.all()
    details = check_exported_graphs(exported.subject, exported.reference)
    assert details[exported.subject.graphs[0].name]["mean"] < largest


def test_graph_with_int32_mask_is_not_changed():
    nodes = [helper.make_node("MatMul", ["embedded", "matrix"], ["states"])]
    model = make_graph(nodes, {"states": ["batch", "length", WIDTH]})
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT32
    assert remove_padding(model) == 0


def make_graph(nodes, outputs, constants=()):
    """Return a model of ids and mask [batch, length]; outputs by name have these shapes."""
    axes = ["batch", "length"]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, axes) for n in ("input_ids", "attention_mask")
    ]
    constants = {
        "table": table(11),
        "matrix": table(WIDTH),
        "bias": np.float32([1, 2, 3, 4]),
        **dict(constants),
    }
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["embedded"]), *nodes], "encoder", inputs,
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def table(rows, columns=WIDTH):
    return np.random.default_rng(rows).normal(0, 1, (rows, columns)).astype(np.float32)


def run(model, mask=MASK, ids=None):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    ids = np.arange(mask.size).reshape(mask.shape) % 11 if ids is None else ids
    return session.run(None, {"input_ids": ids, "attention_mask": mask})


def copy_without_padding(model, products):
    unpadded = onnx.ModelProto()
    unpadded.CopyFrom(model)
    assert remove_padding(unpadded) == products
    onnx.checker.check_model(unpadded, full_check=True)
    return unpadded


HIDDEN = [
    helper.make_node("MatMul", ["embedded", "matrix"], ["product"]),
    helper.make_node("Add", ["product", "bias"], ["linear"]),
    helper.make_node("Add", ["linear", "embedded"], ["hidden"]),
]
HIDDEN_SHAPE = ["batch", "length", WIDTH]


def test_outputs_at_real_tokens_are_unchanged():
    model = make_graph(HIDDEN, {"hidden": HIDDEN_SHAPE})
    unpadded = copy_without_padding(model, 1)
    (expected,), (actual,) = run(model), run(unpadded)
    np.testing.assert_allclose(actual[MASK == 1], expected[MASK == 1], atol=1e-6)
    assert actual.shape == expected.shape


def test_mean_over_mask_is_unchanged():
    """The product with the mask is 0 at padding; the last real token must not be repeated there."""
    pooling = [
        helper.make_node("Cast", ["attention_mask"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "last"], ["weights"]),
        helper.make_node("Mul", ["hidden", "weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "middle"], ["vector"], keepdims=0),
    ]
    axes = {"last": np.array([2]), "middle": np.array([1])}
    model = make_graph([*HIDDEN, *pooling], {"vector": ["batch", WIDTH]}, axes)
    (expected,), (actual,) = run(model), run(copy_without_padding(model, 1))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3]])
def test_parts_of_split_are_unchanged(sizes):
    split = helper.make_node("Split", ["hidden", "sizes"], ["left", "right"], axis=2)
    outputs = {"left": ["batch", "length", sizes[0]], "right": ["batch", "length", sizes[1]]}
    model = make_graph([*HIDDEN, split], outputs, {"sizes": np.array(sizes)})
    unpadded = copy_without_padding(model, 1)
    for expected, actual in zip(run(model), run(unpadded), strict=True):
        np.testing.assert_allclose(actual[MASK == 1], expected[MASK == 1], atol=1e-6)
    splits = sum(node.op_type == "Split" for node in unpadded.graph.node)
    assert splits == (sizes[0] != sizes[1])


def test_parts_with_heads_first_are_unchanged():
    nodes = [helper.make_node("Split", ["hidden", "sizes"], ["left", "right"], axis=-1)]
    outputs = {}
    for name in ("left", "right"):
        nodes += [
            helper.make_node("Reshape", [name, "by_head"], [f"{name}.heads"]),
            helper.make_node("Transpose", [f"{name}.heads"], [f"{name}.first"], perm=[0, 2, 1, 3]),
        ]
        outputs[f"{name}.first"] = ["batch", 2, "length", 1]
    constants = {"sizes": np.array([2, 2]), "by_head": np.array([0, 0, 2, 1])}
    model = make_graph([*HIDDEN, *nodes], outputs, constants)
    for name in ("left", "right"):
        info = helper.make_tensor_value_info(f"{name}.heads", TensorProto.FLOAT, ["batch", "length", 2, 1])
        model.graph.value_info.append(info)
    unpadded = copy_without_padding(model, 1)
    for expected, actual in zip(run(model), run(unpadded), strict=True):
        real = np.broadcast_to(MASK[:, None] == 1, expected.shape[:3])
        np.testing.assert_allclose(actual[real], expected[real], atol=1e-6)
    # the mask's own transpose
    assert [n.op_type for n in unpadded.graph.node].count("Transpose") == 1


def test_operators_over_tokens_see_all_of_them():
    total = helper.make_node("ReduceMax", ["hidden", "middle"], ["most"], keepdims=0)
    model = make_graph([*HIDDEN, total], {"most": ["batch", WIDTH]}, {"middle": np.array([1])})
    full = np.ones_like(MASK)
    (expected,), (actual,) = run(model, full), run(copy_without_padding(model, 1), full)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 5)])
def test_batch_without_real_tokens_runs(shape):
    model = copy_without_padding(make_graph(HIDDEN, {"hidden": HIDDEN_SHAPE}), 1)
    (hidden,) = run(model, np.zeros(shape, np.int64))
    assert hidden.shape == (*shape, WIDTH)


def test_left_padding_is_removed():
    model = make_graph(HIDDEN, {"hidden": HIDDEN_SHAPE})
    left = MASK[:, ::-1].copy()
    (expected,), (actual,) = run(model, left), run(copy_without_padding(model, 1), left)
    np.testing.assert_allclose(actual[left == 1], expected[left == 1], atol=1e-6)


def test_graph_without_mask_is_not_changed():
    model = make_graph(HIDDEN, {"hidden": HIDDEN_SHAPE})
    mask = next(value for value in model.graph.input if value.name == "attention_mask")
    mask.name = "encoder_attention_mask"
    before = model.SerializeToString()
    assert remove_padding(model) == 0
    assert model.SerializeToString() == before


def test_int8_results_do_not_depend_on_padding():
    """One range is computed for a batch: padding was part of it."""
    exported = exported_graphs("marian", "int8")
    session = onnxruntime.InferenceSession(exported.folder / "encoder_model.onnx")
    ids = np.random.default_rng(0).integers(2, 20, (2, 12))
    mask = np.array([[1] * 6 + [0] * 6, [1] * 3 + [0] * 9])
    (long, *_), (short, *_) = (
        session.run(None, {"input_ids": ids[:, :n], "attention_mask": mask[:, :n]}) for n in (12, 6)
    )
    np.testing.assert_array_equal(long[:, :6][mask[:, :6] == 1], short[mask[:, :6] == 1])
    assert np.abs(long[0, :6]).max() > 0


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_generation_graph_equals_generate_on_mixed_lengths(batch_size, num_beams, seq2seq_runner):
    runner, model = seq2seq_runner
    batch = generation_models.random_batch(batch_size, seed=batch_size)
    assert batch_size == 1 or len(set(batch.attention_mask.sum(axis=1))) > 1
    with torch.no_grad():
        actual, expected = generation_models.compare_tokens(
            runner, model, batch, {"num_beams": num_beams, "max_new_tokens": 12}, {}
        )
    assert actual == expected


@pytest.fixture(scope="module")
def seq2seq_runner(tmp_path_factory):
    """A runner over generation graphs made of graphs without padding, and transformers' model."""
    from smelt.export.graphs.export_graph import export_graph, model_graphs

    folder = generation_models.write_model("marian", tmp_path_factory.mktemp("marian"))
    for graph in model_graphs(load_model(folder)[0]):
        exported = export_graph(graph, "ort-cpu", 20)
        assert (remove_padding(exported) > 0) == (graph.name == "encoder_model")
        onnx.save(exported, folder / f"{graph.name}.onnx")
    write_generation_graphs(folder, ["encoder_model", "decoder_with_past_model"])
    with open_folder(folder, "onnx", "ort-cpu", 1) as runner:
        yield runner, generation_models.make_model("marian")


def make_attention_graph(packed, heads=2, value=None):
    """Return masked self-attention between linear layers, of one packed matrix or of three."""
    width, parts = 8, ("query", "key", "value")
    sizes = {"wide": (WIDTH, 3 * width), "out": (width, WIDTH), **dict.fromkeys(parts, (WIDTH, width))}
    matrices = {
        f"{name}.weight": np.random.default_rng(number).normal(size=shape).astype(np.float32)
        for number, (name, shape) in enumerate(sizes.items())
    }
    if packed:
        nodes = [
            helper.make_node("MatMul", ["embedded", "wide.weight"], ["joint"]),
            helper.make_node("Split", ["joint"], parts, axis=-1, num_outputs=3),
        ]
    else:
        nodes = [helper.make_node("MatMul", ["embedded", f"{name}.weight"], [name]) for name in parts]
    settings = {} if value is None else {"mask_filter_value": value, "scale": 0.25}
    nodes += [
        helper.make_node("Cast", ["attention_mask"], ["keys"], to=TensorProto.INT32),
        helper.make_node(
            "MultiHeadAttention", [*parts, "", "keys"], ["attended"],
            domain="com.microsoft", num_heads=heads, **settings,
        ),
        helper.make_node("MatMul", ["attended", "out.weight"], ["hidden"]),
    ]  # fmt: skip
    model = make_graph(nodes, {"hidden": HIDDEN_SHAPE}, matrices)
    info = helper.make_tensor_value_info("attended", TensorProto.FLOAT, ["batch", "length", width])
    model.graph.value_info.append(info)
    return model


@pytest.mark.parametrize("mask", [MASK, np.ones_like(MASK)], ids=["padding", "none"])
@pytest.mark.parametrize(("packed", "value"), [(True, None), (False, None), (True, -2.0)])
def test_split_attention_has_the_bits_of_fused_attention(packed, value, mask):
    """A mask value of -2 shows that padding is weighted as the operator does."""
    fused, split = (make_attention_graph(packed, value=value) for _ in range(2))
    assert remove_padding(fused, split_attention=False) == remove_padding(split) > 0
    operators = [{node.op_type for node in model.graph.node} for model in (fused, split)]
    assert ["MultiHeadAttention" in kinds for kinds in operators] == [True, False]
    onnx.checker.check_model(split, full_check=True)
    (expected,), (actual,) = run(fused, mask), run(split, mask)
    np.testing.assert_array_equal(actual[mask == 1], expected[mask == 1])
    assert np.ptp(actual) > 0


@pytest.mark.parametrize("change", ["bias", "other mask", "unidirectional"])
def test_other_attention_is_not_split(change):
    model = make_attention_graph(packed=True)
    (node,) = [node for node in model.graph.node if node.op_type == "MultiHeadAttention"]
    if change == "bias":
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(24, np.float32), "bias.24"))
        node.input[3] = "bias.24"
    elif change == "other mask":
        model.graph.input.append(
            helper.make_tensor_value_info("other", TensorProto.INT32, ["batch", "length"])
        )
        node.input[4] = "other"
    else:
        node.attribute.append(helper.make_attribute("unidirectional", 1))
    assert remove_padding(model)
    assert any(node.op_type == "MultiHeadAttention" for node in model.graph.node)


@pytest.mark.parametrize(("family", "scheme"), [("bert", "fp32"), ("bert", "int8"), ("marian", "static")])
def test_exported_encoder_splits_all_attention(family, scheme):
    exported = exported_graphs(family, scheme)
    model = onnx.load(exported.folder / f"{exported.subject.graphs[0].name}.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("FusedMatMul") == 2 * kinds.count("Softmax") > 0
    assert "MultiHeadAttention" not in kinds
