"""A stage that computes something else has another `version`; see tests/support/goldens/golden.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from smelt.pipeline.recipe.stages import STAGE_CLASSES
from tests.support.goldens import golden
from tests.support.goldens.golden import CASES

ROOT = Path(__file__).resolve().parents[2]
MEND = (
    "If it is meant to, raise the stage's version, run `make golden`, and say in CHANGELOG.md what changed."
    " If the code is unchanged and another processor makes the golden values, rounding decides a choice: make"
    " it by smelt/core/near_ties.py."
)


def pinned():
    """The versions of the libraries in constraints.txt, as golden.json names them."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    versions = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)", text))
    return ", ".join(f"{name} {'.'.join(versions[name].split('.')[:2])}" for name in golden.LIBRARIES)


@pytest.mark.parametrize("name", CASES)
def test_stage_output_equals_golden_values_of_version(name):
    libraries = golden.libraries()
    entry = golden.read_golden()[name]
    versions = golden.stage_version(CASES[name])
    assert entry["versions"] == versions, f"golden.json tells of {entry['versions']}: run `make golden`."
    if libraries not in entry["libraries"]:
        assert libraries != pinned(), f"golden.json knows nothing of {libraries}: run `make golden`."
        pytest.skip(f"golden.json knows nothing of {libraries}")
    now = golden.fingerprint(CASES[name])
    differences = golden.fingerprint_differences(entry["libraries"][libraries], now, CASES[name].tolerance)
    assert not differences, f"{name}: the result under {versions} became another one. {MEND}\n" + "\n".join(
        differences
    )


# Let this processor compute as an older one does, which adds in another order.
OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}  # fmt: skip
SEARCHES = [
    # quick cases that choose among candidates by what a model computes
    "depth marian, by the loss", "depth bert, of parts", "quantize gpt2, int8-static of the worst float",
    "quantize gpt2, int3 by awq", "quantize gpt2, int4 by hqq", "quantize bert, gptq",
    "quantize gpt2, mixed precision", "quantize bert, int4 and pairs", "quantize bert, int2 by autoround",
]  # fmt: skip


@pytest.fixture(scope="module")
def fingerprints_of_old_processor():
    code = (
        "import json, sys; from tests.support.goldens import golden;"
        "print(json.dumps({name: golden.fingerprint(golden.CASES[name]) for name in sys.argv[1:]}))"
    )
    environment = os.environ | OLD_PROCESSOR | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-W", "ignore", "-c", code, *SEARCHES]
    result = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_choose_equally_on_other_processor(name, fingerprints_of_old_processor):
    golden_values = golden.read_golden()[name]["libraries"].get(golden.libraries())
    if golden_values is None:
        pytest.skip("golden.json knows nothing of these libraries")
    old = fingerprints_of_old_processor[name]
    assert not golden.fingerprint_differences(golden_values, old, CASES[name].tolerance)


def test_golden_values_exist_for_pinned_libraries_and_current_cases():
    golden_entries = golden.read_golden()
    assert list(golden_entries) == list(CASES)
    assert all(pinned() in golden_entry["libraries"] for golden_entry in golden_entries.values())
    stages = {case.stage for case in CASES.values()}
    assert stages == set(STAGE_CLASSES) - {"tensorrt"}  # whose engines hold the machine that built them


@pytest.fixture
def graph(tmp_path):
    weights = [
        onnx.numpy_helper.from_array(np.arange(9, dtype=np.float32).reshape(3, 3), "w"),
        onnx.numpy_helper.from_array(np.arange(9, dtype=np.float32)[::-1].reshape(3, 3).copy(), "v"),
        onnx.numpy_helper.from_array(np.array(0.25, np.float32), "factor"),
    ]
    value = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w"], ["a"], alpha=0.5),
        onnx.helper.make_node("Gemm", ["a", "v"], ["b"], alpha=0.5),
        onnx.helper.make_node("Mul", ["b", "factor"], ["y"]),
    ]
    infos = [value("x", 1, ["n", 3])], [value("y", 1, ["n", 3])]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", *infos, weights))
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path


def changed(folder, how):
    before = golden._graphs_fingerprint(folder)
    model = onnx.load(folder / "model.onnx")
    how(model)
    onnx.save(model, folder / "model.onnx")
    return golden.fingerprint_differences(before, golden._graphs_fingerprint(folder))


def test_changed_node_attribute_constant_or_dimension_is_detected(graph):
    def node(model):
        model.graph.node[2].output[0] = "z"
        model.graph.node.append(onnx.helper.make_node("Identity", ["z"], ["y"]))

    assert "'Identity': 1" in changed(graph, node)[0]

    def attribute(model):
        model.graph.node[0].attribute[0].f = 0.51

    assert "structure" in changed(graph, attribute)[0]

    def constant(model):
        factor = onnx.numpy_helper.from_array(np.array(0.26, np.float32), "factor")
        model.graph.initializer[2].CopyFrom(factor)

    assert changed(graph, constant)[0].startswith("model Mul: ")

    def wiring(model):
        first, second = model.graph.node[:2]
        first.input[1], second.input[1] = second.input[1], first.input[1]

    assert changed(graph, wiring)[0].startswith("model Gemm: ")

    def dimension(model):
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"

    assert changed(graph, dimension)
    assert not changed(graph, lambda model: setattr(model.graph.node[0], "name", "another"))


def case_of(monkeypatch, tmp_path, result):
    """Let there be one case with this result; return where it is kept."""
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    monkeypatch.setattr(golden, "CASES", {"a": golden.Case("quantize", "bert")})
    monkeypatch.setattr(golden, "fingerprint", lambda case: json.loads(json.dumps(result)))
    return tmp_path / "golden.json"


def test_golden_rewrite_is_rejected_for_unchanged_version(monkeypatch, tmp_path, capsys):
    result = {"exact": {"tensors": "1"}, "numbers": {"weight": [1.0, 0.5, -0.5]}}
    file = case_of(monkeypatch, tmp_path, result)
    assert golden.write_golden(["a"]) == 0
    content = file.read_text()
    result["numbers"]["weight"][1] = 0.501  # within what processors differ by
    assert golden.write_golden(["a"]) == 0
    assert file.read_text() == content
    result["numbers"]["weight"][1] = 0.6
    assert golden.write_golden(["a"]) == 1
    assert file.read_text() == content
    assert "raise the version of the stage" in capsys.readouterr().out
    monkeypatch.setattr(golden, "stage_version", lambda case: "quantize 99")
    assert golden.write_golden(["a"]) == 0
    golden_entry = json.loads(file.read_text())["a"]
    assert (golden_entry["versions"], len(golden_entry["libraries"])) == ("quantize 99", 1)
    assert golden_entry["libraries"][golden.libraries()] == result
