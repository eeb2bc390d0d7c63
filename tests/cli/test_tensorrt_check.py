"""The command `smelt tensorrt-check`: what it prints, with which code it ends, what the parser adds."""

import json
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.export.tensorrt import preflight as module
from smelt.export.tensorrt.preflight import run_parser
from smelt.runtimes import tensorrt_engine
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.graphs import graph_exports
from tests.support.processes import tensorrt_rig


@pytest.fixture(autouse=True)
def without_tensorrt(monkeypatch):
    monkeypatch.setattr(tensorrt_engine, "TENSORRT_PACKAGES", ("a_package_that_nobody_has",))


def save(path, weight, nodes=1):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    names = ["x", *(f"h{index}" for index in range(1, nodes)), "y"]
    matmuls = [
        helper.make_node("MatMul", [names[index], "w"], [names[index + 1]], name=f"m{index}")
        for index in range(nodes)
    ]
    body = helper.make_graph(matmuls, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


GOOD, MIXED = np.ones((4, 4), np.float32), np.ones((4, 4), np.float16)


def test_valid_graph_passes_without_parser(tmp_path):
    done = harness.smelt("tensorrt-check", save(tmp_path / "m.onnx", GOOD))
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'm.onnx'}: ")
    assert second.startswith("  ")
    (checked,) = json.loads(harness.smelt("tensorrt-check", tmp_path / "m.onnx", "--json", code=0).stdout)
    assert (checked["rejected"], checked["problems"], checked["parser"]["version"]) == (False, [], None)


def test_findings_of_folder_have_node_reason_and_hint(tmp_path):
    save(tmp_path / "a.onnx", MIXED, nodes=5)
    save(tmp_path / "b.onnx", GOOD)
    done = harness.smelt("tensorrt-check", tmp_path, code=1)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'a.onnx'}: ")
    assert lines[1].startswith("  rejected: node 'm0' (MatMul): ")
    assert all(value in lines[1] for value in ("float ('x')", "float16 ('w')"))
    assert lines[2].startswith("    -> ")
    assert "Cast" in lines[2]
    assert any(line.startswith(f"{tmp_path / 'b.onnx'}: ") for line in lines)


def test_locations_of_finding_are_limited_to_three(tmp_path):
    weights = np.full((4, 4), 1e39)  # of doubles, rounded to float: one finding a constant
    model = onnx.load(save(tmp_path / "m.onnx", GOOD))
    model.graph.initializer.extend(numpy_helper.from_array(weights, f"c{index}") for index in range(5))
    onnx.save(model, tmp_path / "m.onnx")
    text = harness.smelt("tensorrt-check", tmp_path / "m.onnx", code=1).stdout
    expected = "the constant 'c0', the constant 'c1', the constant 'c2' and 2 more: double; TensorRT rounds"
    assert f"built otherwise: {expected}" in text


def test_json_has_rule_outcome_location_message_and_hint(tmp_path):
    done = harness.smelt("tensorrt-check", save(tmp_path / "m.onnx", MIXED), "--json", code=1)
    (checked,) = json.loads(done.stdout)
    assert checked["rejected"] is True
    (problem,) = checked["problems"]
    assert (problem["rule"], problem["outcome"], problem["location"]) == (
        "mixed-types", "rejected", "node 'm0' (MatMul)",
    )  # fmt: skip
    assert problem["hint"]
    assert checked["parser"]["version"] is None


def test_damaged_file_is_finding_and_others_are_checked(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"\xff\xff\xff")
    save(tmp_path / "b.onnx", GOOD)
    damaged, valid = json.loads(harness.smelt("tensorrt-check", tmp_path, "--json", code=1).stdout)
    assert [problem["rule"] for problem in damaged["problems"]] == ["unreadable"]
    assert (valid["file"], valid["problems"]) == (str(tmp_path / "b.onnx"), [])


@pytest.mark.parametrize("content", [b"", b"\x08\x07"])
def test_file_without_graph_is_unreadable(tmp_path, content):
    """Protobuf reads an empty file as a model without a word."""
    (tmp_path / "m.onnx").write_bytes(content)
    (checked,) = json.loads(harness.smelt("tensorrt-check", tmp_path / "m.onnx", "--json", code=1).stdout)
    (problem,) = checked["problems"]
    assert problem["rule"] == "unreadable"


@pytest.mark.parametrize(("what", "code"), [("nothing", "missing-file"), ("empty", "missing-graph")])
def test_missing_graph_is_rejected_with_hint(tmp_path, what, code):
    (tmp_path / "empty").mkdir()
    error = command_error(harness.smelt("tensorrt-check", tmp_path / what, code=2))
    assert error.code == code
    assert "onnx" in str(error)


def test_graphs_for_onnx_runtime_are_rejected_and_for_tensorrt_accepted():
    for target, code in (("ort-cpu", 1), ("tensorrt", 0)):
        folder = graph_exports.exported_graphs("bert", "fp32", target).folder
        (checked,) = json.loads(harness.smelt("tensorrt-check", folder, "--json", code=code).stdout)
        assert checked["rejected"] is bool(code)


def ask(path):
    """`run_parser` on the rig, in a process of its own."""
    code = (
        "import sys; from pathlib import Path; from smelt.export.tensorrt.preflight import run_parser\n"
        "import json; print(json.dumps(run_parser(Path(sys.argv[1]))._asdict()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=tensorrt_rig.rig_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_installed_parser_is_used_if_builder_can_be_created(tmp_path):
    valid = ask(save(tmp_path / "good.onnx", GOOD))
    assert (valid["asked"][:12], valid["errors"], valid["why"]) == ("tensorrt 11.", [], "")
    (error,) = ask(save(tmp_path / "mixed.onnx", MIXED))["errors"]
    assert "mixed.onnx: node 'm0' (MatMul): two data types meet in one operator" in error


def test_dead_parser_process_is_reported_as_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorrt_engine, "find_tensorrt", lambda: "tensorrt")
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    verdict = run_parser(tmp_path / "m.onnx")
    assert verdict.asked is None
    assert re.findall(r"\d+", verdict.why) == ["1"]  # the exit status
