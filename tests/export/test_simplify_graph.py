"""What a simplifier gives is kept only where it computes the same, on padded rows of different tokens."""

import shutil

import numpy as np
import onnx
import onnxsim
import pytest

from smelt.core.messages import Message
from smelt.export import graph_files, simplify_graph
from smelt.export.parity.parity_samples import EXAMPLE_LENGTHS, OTHER_EXAMPLE_LENGTHS
from smelt.export.simplify_graph import run_onnxsim, simplify_file
from smelt.runtimes.graph_walk import external_locations
from tests.support.graphs import graph_exports, mutations
from tests.support.graphs.graph_edits import insert_after_value, replace_values
from tests.support.pairs.matrix import matrix_cells

TOKENS = np.arange(2, 40)


def code_of(message: Message | None) -> str | None:
    return message and message.code


GRAPHS = [
    ("marian", "encoder_model"), ("marian", "decoder_with_past_model"), ("bert", "model"), ("gpt2", "model"),
]  # fmt: skip


def graph_of(family, name, folder, scheme="fp32"):
    """Copy a finished graph, as a simplifier gets one."""
    shutil.copyfile(
        graph_exports.exported_graphs(family, scheme).folder / f"{name}.onnx", folder / f"{name}.onnx"
    )
    return folder / f"{name}.onnx"


def simplifier(monkeypatch, change, good=True):
    """Let onnxsim give the graph that it got, changed by `change`."""

    def fake(model, skipped_optimizers=None, output_path=None):
        simplified = (
            onnx.load(model) if isinstance(model, str) else type(model).FromString(model.SerializeToString())
        )
        change(simplified)
        if output_path is not None:
            onnx.save(simplified, output_path)
        return simplified, good

    monkeypatch.setattr(onnxsim, "simplify", fake)


MISTAKES = ["drop_padding_mask", "mask_of_ones", "shift_the_mask", "drop_layer"]


@pytest.mark.parametrize(("graph", "error"), matrix_cells(GRAPHS, MISTAKES))
def test_candidate_without_mask_or_layer_is_rejected(graph, error, tmp_path, monkeypatch):
    path = graph_of(*graph, tmp_path)
    file_bytes = path.read_bytes()
    simplifier(monkeypatch, mutations.ALL[error])
    assert code_of(simplify_file(path, TOKENS)) == "outputs-changed"
    assert path.read_bytes() == file_bytes
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("outside", [False, True])
def test_equal_candidate_is_accepted(outside, tmp_path, monkeypatch):
    path = graph_of(*GRAPHS[outside], tmp_path)
    if outside:
        monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 1000)
        graph_files.write_graph(onnx.load(path), path)

    def note(model):
        model.doc_string = "simplified"

    simplifier(monkeypatch, note)
    assert simplify_file(path, TOKENS) is None
    assert onnx.load(path).doc_string == "simplified"
    names = {path.name, f"{path.name}_data"} if outside else {path.name}
    assert {p.name for p in tmp_path.iterdir()} == names


def last_digits(model):
    """Change what is no code as another order of sums does."""
    for tensor in model.graph.initializer:
        if tensor.name.lower().endswith("norm.weight"):
            replace_values(tensor, lambda v: v * np.float32(1 + 3e-6))


def test_rounding_to_neighboring_quantized_values_is_no_difference(tmp_path, monkeypatch):
    """Products of int8-groupwise round activations to codes; what one of these moves is far above 1e-4."""
    path = graph_of("bert", "model", tmp_path, "groupwise")
    original_path = tmp_path / "before.onnx"
    shutil.copyfile(path, original_path)
    simplifier(monkeypatch, last_digits)
    assert simplify_file(path, TOKENS) is None
    assert path.read_bytes() != original_path.read_bytes()
    assert simplify_graph._max_difference(original_path, path, TOKENS) > 10 * simplify_graph._TOLERANCE
    assert {p.name for p in tmp_path.iterdir()} == {path.name, original_path.name}


def coarser(model):
    """Round what products are fed twenty times as coarsely."""
    tensors_by_name = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            replace_values(tensors_by_name[node.input[1]], lambda v: v * np.float32(20))


def whole(model):
    """Round nothing that products are fed."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0


@pytest.mark.parametrize(("scheme", "error"), [
    ("static", coarser), ("groupwise", whole), ("groupwise", mutations.ALL["drop_padding_mask"]),
    ("groupwise", mutations.ALL["drop_layer"]), ("groupwise", mutations.ALL["take_another_layers_scales"]),
    ("static", mutations.ALL["mask_of_ones"]),
])  # fmt: skip
def test_different_quantized_candidate_is_rejected(scheme, error, tmp_path, monkeypatch):
    path = graph_of("bert", "model", tmp_path, scheme)
    file_bytes = path.read_bytes()
    simplifier(monkeypatch, error)
    assert code_of(simplify_file(path, TOKENS)) == "outputs-changed"
    assert path.read_bytes() == file_bytes


@pytest.mark.parametrize("lengths", [EXAMPLE_LENGTHS, OTHER_EXAMPLE_LENGTHS])
def test_candidate_with_fixed_batch_size_is_rejected(lengths, tmp_path, monkeypatch):
    path = graph_of("bert", "model", tmp_path)

    def fix(model):
        ids = np.array([len(lengths), max(lengths)])
        model.graph.initializer.append(onnx.numpy_helper.from_array(ids, "size"))
        for node in model.graph.node:
            node.input[:] = ["of_one_size" if name == "input_ids" else name for name in node.input]
        node = onnx.helper.make_node("Reshape", ["input_ids", "size"], ["of_one_size"])
        model.graph.node.insert(0, node)

    simplifier(monkeypatch, fix)
    assert code_of(simplify_file(path, TOKENS)) == "outputs-changed"


def infinite(model):
    bias = next(t for t in model.graph.initializer if t.name.endswith("norm.bias"))
    replace_values(bias, lambda v: v * np.inf)


def renamed_input(model):
    model.graph.input[0].name = "others"
    for node in model.graph.node:
        node.input[:] = ["others" if name == "input_ids" else name for name in node.input]


@pytest.mark.parametrize("change", [infinite, renamed_input])
def test_incomparable_candidate_is_rejected(change, tmp_path, monkeypatch):
    path = graph_of("marian", "encoder_model", tmp_path)
    simplifier(monkeypatch, change)
    assert code_of(simplify_file(path, TOKENS)) == "outputs-changed"


def test_rejected_candidates_leave_graph_unchanged(tmp_path, monkeypatch):
    path = graph_of("marian", "encoder_model", tmp_path)
    file_bytes = path.read_bytes()

    def larger(model):
        constant = onnx.numpy_helper.from_array(np.ones(30_000, np.float32), "more")
        model.graph.initializer.append(constant)

    def broken(model):
        raise RuntimeError("bad pass")

    simplifier(monkeypatch, larger)
    assert code_of(simplify_file(path, TOKENS)) == "larger-graph"
    simplifier(monkeypatch, lambda model: None, good=False)
    assert code_of(simplify_file(path, TOKENS)) == "onnxsim-check-failed"
    simplifier(monkeypatch, broken)
    assert code_of(simplify_file(path, TOKENS)) == "onnxsim-failed"
    assert path.read_bytes() == file_bytes
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_external_weights_are_kept_if_simplification_fails(tmp_path, monkeypatch):
    from smelt.core import system

    path = graph_of("bert", "model", tmp_path)
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 1000)
    graph_files.write_graph(onnx.load(path), path)
    monkeypatch.setattr(system, "available_bytes", lambda: 1000)
    assert code_of(run_onnxsim(path, tmp_path)) == "out-of-memory"
    monkeypatch.setattr(onnxsim, "simplify", lambda model, skipped_optimizers=None: pytest.fail("called"))
    assert code_of(run_onnxsim(path, tmp_path)) == "outdated-package"
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx_data"}


@pytest.mark.parametrize("outside", [True, False])
def test_onnxsim_receives_graph_without_large_weights(outside, tmp_path, monkeypatch):
    path = graph_of("bert", "model", tmp_path)
    if outside:
        monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 1000)
    monkeypatch.setattr(simplify_graph, "_WHOLE_GRAPH_BYTES", 1000)
    monkeypatch.setattr(simplify_graph, "_LARGE_WEIGHT_BYTES", 2000)  # not read
    simplify, tensor_sizes = onnxsim.simplify, []

    def observed(model, **more):
        tensor_sizes.extend(len(tensor.raw_data) for tensor in model.graph.initializer)
        return simplify(model, **more)

    monkeypatch.setattr(onnxsim, "simplify", observed)
    model = onnx.load(path)
    first = next(name for node in model.graph.node for name in node.input)
    insert_after_value(model, first, -1, "Identity")
    graph_files.write_graph(model, path)
    nodes, weights = len(model.graph.node), external_locations(onnx.load(path, load_external_data=False))
    assert simplify_file(path, TOKENS) is None
    simplified = onnx.load(path, load_external_data=False)
    assert len(simplified.graph.node) < nodes
    files = {"model.onnx_data"} if outside else set()
    assert external_locations(simplified) == weights == files
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", *files}
    assert 0 < max(tensor_sizes) < 2000
