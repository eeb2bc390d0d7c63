"""Files that anybody may have written: what is damaged is said, in a process with limits."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from smelt.core.system import ProcessLimits
from smelt.export.tensorrt import preflight as module
from smelt.export.tensorrt.preflight import check_onnx_for_tensorrt, subprocess_main
from tests.support.graphs import imported_graphs as graphs


def found(path: Path) -> list[tuple[str, str]]:
    """Rule and text of each finding, looked at in this process."""
    return [(problem.rule, problem.text) for problem in subprocess_main([str(path)])]


def reads_nothing() -> Any:
    model = graphs.one_node_model()
    model.graph.node[0].input[0] = "nowhere"
    return model


def constant_of_a_file() -> Any:
    """A graph whose Constant node, no initializer, says that its value lies in another folder."""
    weight = graphs.model_with_external_data("../weights.bin").graph.initializer[0]
    nodes = [
        helper.make_node("Constant", [], ["w"], value=weight),
        helper.make_node("Add", ["x", "w"], ["y"]),
    ]
    return graphs.make_model(nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])])


@pytest.mark.parametrize(("make", "expected"), [
    (lambda: graphs.model_with_tensor([1 << 16, 1 << 16], bytes(32)), " 32 bytes"),
    (lambda: graphs.model_with_tensor([1 << 40, 1 << 30], b"1234"), "1.18e+21"),
    (lambda: graphs.model_with_external_data("gone.bin"), "gone.bin"), (constant_of_a_file, "../weights.bin"),
    (reads_nothing, "'nowhere'"), (graphs.cyclic_model, "Add 'one' -> Relu 'two'"),
])  # fmt: skip
def test_damaged_file_reports_only_structural_problems(tmp_path: Path, make: Any, expected: str) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(32))
    ((rule, text),) = found(graphs.save_model(make(), tmp_path / "inside" / "m.onnx"))
    assert rule == "damaged"
    assert expected in text


def test_problems_beyond_twenty_are_counted(tmp_path: Path) -> None:
    model = graphs.one_node_model()
    for tensor_index in range(25):
        model.graph.initializer.append(
            graphs.model_with_tensor([4], bytes(tensor_index)).graph.initializer[0]
        )
        model.graph.initializer[-1].name = f"w{tensor_index}"
    texts = [text for _, text in found(graphs.save_model(model, tmp_path / "m.onnx"))]
    assert len(texts) == 21
    assert " 4 " in texts[-1]  # one of them holds what it should


def test_subprocess_rule_results_equal_in_process_results(tmp_path: Path) -> None:
    path = graphs.save_model(graphs.one_node_model("Magic", "com.evil"), tmp_path / "m.onnx")
    assert check_onnx_for_tensorrt(path) == subprocess_main([str(path)])
    assert [problem.rule for problem in check_onnx_for_tensorrt(path)] == ["foreign-operator"]


def test_file_exceeding_memory_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.write_many_empty_nodes(tmp_path / "m.onnx", 3_000_000)
    monkeypatch.setattr(module, "validation_limits", lambda path: ProcessLimits(400_000_000, 12.0))
    (problem,) = check_onnx_for_tensorrt(tmp_path / "m.onnx")
    assert (problem.rule, problem.severity) == ("unreadable", "error")
    # Which limit is met first differs between machines: some take little memory for a node.
    assert " 0.4 GB " in problem.text or " 12 s " in problem.text


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    (problem,) = check_onnx_for_tensorrt(tmp_path / "gone.onnx")
    assert (problem.rule, problem.severity) == ("unreadable", "error")
    assert os.strerror(errno.ENOENT) in problem.reason
