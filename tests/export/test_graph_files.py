"""Weights above the limit lie in one file next to their graph, all the way; no other file is left."""

import os
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.artifact import Manifest, read_artifact
from smelt.core.errors import RunError
from smelt.core.store import Store
from smelt.export import graph_files
from smelt.export.graph_files import (
    external_data_names,
    external_data_path,
    has_external_data,
    inline_weight_bytes,
    read_graph,
    set_input_defaults,
    write_graph,
)
from smelt.export.half_graphs import open_with_measurements
from smelt.export.onnx_stage import Onnx
from smelt.export.parity.parity_samples import example_feeds
from smelt.export.settings import OnnxSettings
from smelt.runtimes.registry import open_runner
from smelt.runtimes.tensorrt_engine import external_data_files, graph_hash
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports
from tests.support.models import causal, tiny
from tests.support.pairs import matrix

LIMIT = 2000
# each family and target once; and what else there is
CASES = [("marian", "fp32", "ort-cpu", "fp32"), ("gpt2", "int8", "ort-cpu", "fp32"),
         ("bert", "fp32", "tensorrt", "fp16")]  # fmt: skip
if matrix.is_full_matrix():
    CASES += [("bert", "binary", "ort-cpu", "fp32"), ("marian", "int8", "ort-cpu", "fp32"),
              ("marian", "binary", "ort-cpu", "fp32"),
              ("bert", "int8", "ort-cpu", "fp32"), ("gpt2", "int4", "ort-cpu", "fp32"),
              ("bert", "fp32", "ort-cpu", "fp32"), ("gpt2", "fp32", "ort-cpu", "fp32"),
              ("gpt2", "fp32", "tensorrt", "fp16")]  # fmt: skip


def model(values=(("large", 1000), ("small", 3), ("other", 501))):
    constants = [numpy_helper.from_array(np.arange(n, dtype=np.float32), name) for name, n in values]
    nodes = [helper.make_node("ReduceSum", [name], [f"{name}.sum"], keepdims=0) for name, _ in values]
    nodes.append(helper.make_node("Sum", [f"{name}.sum" for name, _ in values], ["y"]))
    graph = helper.make_graph(
        nodes, "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])], constants
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def total(path):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return float(session.run(None, {})[0])


def test_weights_above_limit_are_external_and_below_it_inline(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    assert inline_weight_bytes(model()) == 4 * 1504
    write_graph(model(), path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    inline_size, sum_inside = path.stat().st_size, total(path)
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", LIMIT)
    for _ in range(2):  # again into the same files: nothing is appended
        write_graph(model(), path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx_data"]
        assert (
            external_data_path(path).stat().st_size == 4032 + 4 * 501
        )  # the second begins at a line of 64 bytes
    assert path.stat().st_size < inline_size / 5
    assert total(path) == sum_inside
    structure = read_graph(path, values=False)
    assert has_external_data(structure)
    external_names = {t.name for t in structure.graph.initializer if t.external_data}
    assert external_names == {"large", "other"}
    write_graph(structure, path)  # the structure alone; the data stays
    assert total(path) == sum_inside
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 10**9)
    write_graph(read_graph(path), path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert total(path) == sum_inside


def test_large_tensors_are_page_aligned(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", LIMIT)
    path = tmp_path / "model.onnx"
    write_graph(model((("a", 300), ("b", 300_000), ("c", 257))), path)
    offsets = {
        t.name: int(e.value)
        for t in read_graph(path, values=False).graph.initializer
        for e in t.external_data
        if e.key == "offset"
    }
    assert offsets == {"a": 0, "b": 4096, "c": -(-(4096 + 1_200_000) // 64) * 64}


def test_damaged_graph_or_missing_data_file_raises_error(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"nothing of the kind")
    with raises_code("damaged-file", RunError) as excinfo:
        read_graph(path)
    assert excinfo.value.file == str(path)
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", LIMIT)
    write_graph(model(), path)
    external_data_path(path).unlink()
    with raises_code("damaged-file", RunError) as excinfo:
        read_graph(path)
    assert "model.onnx_data" in str(excinfo.value)
    assert read_graph(path, values=False).graph.node


def test_input_with_default_is_optional(tmp_path):
    node = helper.make_node("Add", ["x", "more"], ["y"])
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.INT64, [2]), value("more", TensorProto.INT64, [])]
    graph = helper.make_graph([node], "g", ends, [value("y", TensorProto.INT64, [2])])
    path = tmp_path / "g.onnx"
    write_graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    set_input_defaults(path, {"more": 5})
    onnx.checker.check_model(str(path))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    x = np.array([1, 2])
    assert session.run(None, {"x": x})[0].tolist() == [6, 7]
    assert session.run(None, {"x": x, "more": np.array(1)})[0].tolist() == [2, 3]


@pytest.mark.parametrize(("family", "scheme", "target", "dtype"), CASES)
def test_artifact_with_external_weights_is_relocatable(family, scheme, target, dtype, tmp_path, monkeypatch):
    """Exported, committed, counted, moved and opened by plain ONNX Runtime; equal to the inline one."""
    inline = graph_exports.exported_graphs(family, scheme, target, dtype)
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", LIMIT)
    _, task = graph_exports.FAMILIES[family]
    source = inline.folder.parent / ("model" if scheme == "fp32" else "codes")
    store = Store(tmp_path / "store")
    with store.workspace() as space:
        ctx = graph_exports.make_context(space / "out", task)
        Onnx()(
            tiny.as_artifact(source, task),
            OnnxSettings(target=target, dtype=dtype, generation_graph=False),
            ctx,
        )
        manifest = Manifest(
            key="1" * 64, format="onnx", task=task, stage="onnx", settings={}, seed=0, parent=None,
            versions={}, details=ctx.details,
        )  # fmt: skip
        artifact = store.commit(ctx.out, manifest)
    names = [g.name for g in inline.subject.graphs]
    graphs = {p.name for p in artifact.path.iterdir() if ".onnx" in p.name}
    assert graphs == {f"{n}.onnx{end}" for n in names for end in ("", "_data")}
    assert not list(artifact.path.glob(".*"))
    inline_size = sum((inline.folder / f"{n}.onnx").stat().st_size for n in names)
    assert artifact.size_bytes == pytest.approx(inline_size, rel=0.1)
    for name in names:
        tensors = read_graph(artifact.path / f"{name}.onnx", values=False).graph.initializer
        matrices = {t.data_type for t in tensors if len(t.dims) > 1}  # norms stay float32
        assert (TensorProto.FLOAT in matrices) == (dtype == "fp32")
    copied_folder = tmp_path / "elsewhere" / "model"
    shutil.copytree(artifact.path, copied_folder)
    shutil.rmtree(artifact.path)
    for name in names:
        sessions = [
            onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
            for folder in (copied_folder, inline.folder)
        ]
        for feeds in example_feeds(sessions[0], np.arange(2, 40)):
            for actual, expected in zip(*(s.run(None, feeds) for s in sessions), strict=True):
                np.testing.assert_allclose(actual, expected, atol=1e-5)
    with open_runner(read_artifact(copied_folder), 1) as runner:
        assert runner.config["model_type"] == family


def test_stale_torch_data_file_is_removed(tmp_path, monkeypatch):
    """torch writes `NAME.onnx.data` of its own above a limit; nothing goes through that any more."""
    from torch.onnx._internal.exporter import _onnx_program

    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 100)
    folder = causal.write_model(tmp_path / "m", "gpt2")
    ctx = graph_exports.make_context(tmp_path / "out", "language-modeling")
    Onnx()(tiny.as_artifact(folder, "language-modeling"), OnnxSettings(generation_graph=False), ctx)
    assert [p.name for p in ctx.out.iterdir() if "onnx" in p.name] == ["model.onnx"]


def branch(name):
    weight = numpy_helper.from_array(np.full(1000, len(name), np.float32), f"w.{name}")
    node = helper.make_node("ReduceSum", [weight.name], [f"y.{name}"], keepdims=0)
    return helper.make_graph(
        [node], name, [], [helper.make_tensor_value_info(f"y.{name}", TensorProto.FLOAT, [])], [weight]
    )


def test_external_weights_of_subgraphs_are_kept(tmp_path):
    """An If whose branches have their weights in another file."""
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("yes"), else_branch=branch("no"))
    branch_outputs = [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    outer = helper.make_graph(
        [node], "g", branch_outputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])]
    )
    outer_model = helper.make_model(outer, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "model.onnx"
    weights = external_data_path(path)
    onnx.save(outer_model, path, save_as_external_data=True, location=weights.name, size_threshold=0)
    structure = read_graph(path, values=False)
    assert external_data_names(structure) == {weights.name}
    assert external_data_files(path) == [weights]
    write_graph(structure, path)
    assert weights.is_file()
    initial_hash = graph_hash(path)
    weights.write_bytes(weights.read_bytes()[::-1])
    assert graph_hash(path) != initial_hash


def test_external_weights_are_copied_if_hard_links_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", LIMIT)
    write_graph(model(), tmp_path / "model.onnx")

    def refuse(*args, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    session = open_with_measurements(read_graph(tmp_path / "model.onnx"), tmp_path, "model", 1)
    assert "smelt.largest.large.sum" in {output.name for output in session.get_outputs()}
