import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError, MissingDependencyError, RunError
from smelt.core.files import sha256_of
from smelt.core.messages import message_codes, warning
from smelt.data.splits import Example, Split
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt import stage as module
from smelt.export.tensorrt.build_engine import BuildOptions, BuiltEngine, ProfileShapes, SizeRange
from smelt.export.tensorrt.profiles import profile_ranges
from smelt.export.tensorrt.stage import TensorrtStage
from smelt.runtimes import tensorrt_engine
from smelt.runtimes.tensorrt_engine import EngineSidecar, graph_hash, read_sidecar
from smelt.stage import Context
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] word"


class FakeTensorrt:
    """Stands where the package would be; the builder itself is tried in test_build_engine.py."""

    __name__ = "tensorrt"
    __version__ = "11.4.0"


def classifier(folder: Path, weight: float = 1.0) -> Any:
    ids = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])
    table = numpy_helper.from_array(np.full((6, 2), weight, np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"], name="look"),
        helper.make_node("ReduceMax", ["rows"], ["logits"], axes=[1], keepdims=0, name="most"),
    ]
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph(nodes, "g", ids, [logits], [table]), opset_imports=opset)
    onnx.save(model, folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 16}))
    (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 16}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def artifact(folder: Path, target: str = "tensorrt") -> Artifact:
    manifest = Manifest(
        key="a" * 64,
        format="onnx",
        task="text-classification",
        stage="onnx",
        settings={},
        seed=0,
        parent=None,
        versions={},
        details={"target": target, "parameters": 12, "dtype": "fp32"},
    )
    return Artifact(folder, manifest)


def context(out: Path, words: list[int]) -> Context:
    examples = tuple(Example("word " * n, label=0) for n in words)
    return harness.make_context(
        out, "text-classification", data={"validation": Split("made", examples)} if examples else {}
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "onnx"
    folder.mkdir()
    classifier(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_onnx_for_other_target_is_rejected(source: Path, out: Path) -> None:
    with raises_code("unsupported-target", InputError) as excinfo:
        TensorrtStage()(artifact(source, "ort-cpu"), TensorrtSettings(), context(out, [3]))
    assert "'ort-cpu'" in str(excinfo.value)
    assert "onnx: {target: tensorrt}" in str(excinfo.value)


def test_missing_tensorrt_error_contains_install_command(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_engine, "TENSORRT_PACKAGES", ("a_package_that_nobody_has",))
    with raises_code("not-installed", MissingDependencyError) as excinfo:
        TensorrtStage()(artifact(source), TensorrtSettings(), context(out, [3]))
    assert "pip install tensorrt" in str(excinfo.value)
    assert "optional: true" in str(excinfo.value)


def test_outdated_tensorrt_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("__version__ = '10.9.0.34'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "tensorrt", raising=False)
    with raises_code("outdated-package", InputError) as excinfo:
        tensorrt_engine.import_tensorrt()
    assert "10.9.0.34" in str(excinfo.value)
    __import__("sys").modules.pop("tensorrt", None)


def test_stage_builds_an_engine_per_graph_for_the_lengths_of_the_data(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_calls: dict[str, tuple[ProfileShapes, BuildOptions]] = {}

    def build(
        trt: Any, path: Path, profiles: list[ProfileShapes], options: BuildOptions, progress: Any
    ) -> BuiltEngine:
        [shapes] = profiles
        build_calls[path.name] = shapes, options
        return BuiltEngine(
            b"plan", [warning("tensorrt-warning", "something to know")], {"layers": 3}, {"layers": 2}
        )

    monkeypatch.setattr(module, "import_tensorrt", FakeTensorrt)
    monkeypatch.setattr(module, "build_engine", build)
    ctx = context(out, [1, 2, 3, 4, 5])
    TensorrtStage()(artifact(source), TensorrtSettings(timing_cache=False, max_batch_size=4), ctx)
    assert (out / "model.plan").read_bytes() == b"plan"
    assert {p.name for p in out.iterdir()} == {
        "model.plan",
        "model.plan.json",
        "config.json",
        "vocab.txt",
        "tokenizer_config.json",
    }
    # [CLS] and [SEP] make 3 to 7 tokens; the median is 5, the longest 7, rounded up to 8
    expected = ((1, 1), (1, 5), (4, 8))
    shapes, options = build_calls["model.onnx"]
    assert shapes == dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), expected)
    assert options == BuildOptions(None, 3, True, "none", False, None)
    assert ctx.details["profile"] == {"batch": [1, 1, 4], "input": [1, 5, 8]}
    assert ctx.details["parameters"] == 12
    assert ctx.details["engines"] == {"model": {"network": {"layers": 3}, "kernels": {"layers": 2}}}
    assert ctx.details["tensorrt"] == "tensorrt 11.4.0"
    assert [(message.code, message.file) for message in ctx.warnings] == [("tensorrt-warning", "model.onnx")]
    assert "something to know" in ctx.warnings[0].message
    sidecar = read_sidecar(out / "model.plan")
    assert sidecar == EngineSidecar(
        package="tensorrt",
        version="11.4.0",
        gpu=None,
        graph="model.onnx",
        graph_sha256=sha256_of(source / "model.onnx"),
        size_bytes=4,
        weights="embedded",
        version_compatible=False,
        hardware_compatibility="none",
        flags={"tf32": True, "optimization_level": 3, "weight_streaming": False},
        profiles=[{name: [[1, 1], [1, 5], [4, 8]] for name in shapes}],
    )


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """TensorRT replaced: what is asked of the builder, by graph."""
    build_calls: dict[str, Any] = {}

    def build(trt: Any, path: Path, profiles: Any, options: Any, progress: Any) -> BuiltEngine:
        build_calls[path.name] = profiles, options
        return BuiltEngine(b"plan", [], {}, None)

    monkeypatch.setattr(module, "import_tensorrt", FakeTensorrt)
    monkeypatch.setattr(module, "build_engine", build)
    return build_calls


def test_profiles_inherit_unset_values_from_step(source: Path, out: Path, built: dict[str, Any]) -> None:
    settings = TensorrtSettings.model_validate(
        {
            "timing_cache": False, "max_batch_size": 4, "opt_batch_size": 2,
            "profiles": [
                {"max_batch_size": 1, "length_percentile": 10}, {},
                {"opt_batch_size": 4, "lengths": {"opt": 3, "max": 4}},
            ],
        }
    )  # fmt: skip
    ctx = context(out, [1] * 8 + [10] * 8 + [13] * 4)
    TensorrtStage()(artifact(source), settings, ctx)
    profiles, _ = built["model.onnx"]
    expected = [((1, 1), (1, 8), (1, 8)), ((1, 1), (2, 12), (4, 16)), ((1, 1), (4, 3), (4, 4))]
    assert [shapes["input_ids"] for shapes in profiles] == expected
    assert ctx.details["profile"] == {"batch": [1, 2, 4], "input": [1, 12, 16]}
    assert [profile["input"][2] for profile in ctx.details["profiles"]] == [8, 16, 4]
    sidecar = read_sidecar(out / "model.plan")
    assert sidecar is not None
    assert [profile["input_ids"][2] for profile in sidecar.profiles] == [[1, 8], [4, 16], [4, 4]]


def test_profile_percentile_overrides_step_lengths() -> None:
    settings_values = {"lengths": {"opt": 3, "max": 4}, "profiles": [{"length_percentile": 60}, {}]}
    first, second = TensorrtSettings.model_validate(settings_values).each_profile()
    assert (first.lengths, first.length_percentile) == (None, 60)
    assert second.lengths is not None


def test_profiles_without_covering_profile_are_rejected(source: Path, out: Path) -> None:
    profiles = [
        {"max_batch_size": 1, "lengths": {"opt": 4, "max": 16}},
        {"max_batch_size": 8, "lengths": {"opt": 4, "max": 8}},
    ]
    settings = TensorrtSettings.model_validate({"profiles": profiles})
    with raises_code("no-covering-profile", InputError) as excinfo:
        profile_ranges(source, settings, context(out, [3]))
    assert "max_batch_size" in str(excinfo.value)


def test_engine_with_stripped_weights_includes_graph(source: Path, out: Path, built: dict[str, Any]) -> None:
    model = onnx.load(source / "model.onnx")
    onnx.save(model, source / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    settings = TensorrtSettings(timing_cache=False, weights="stripped")
    TensorrtStage()(artifact(source), settings, context(out, [3]))
    assert built["model.onnx"][1].weights == "stripped"
    assert {p.name for p in out.glob("*")} >= {"model.plan", "model.plan.json", "model.onnx", "w.data"}
    sidecar = read_sidecar(out / "model.plan")
    assert sidecar is not None
    assert sidecar.graph_sha256 == graph_hash(out / "model.onnx")
    (out / "w.data").write_bytes(b"x" + (out / "w.data").read_bytes()[1:])
    assert sidecar.graph_sha256 != graph_hash(out / "model.onnx")  # the weights count, not the graph alone


def test_preflight_errors_stop_the_stage_before_the_build(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier(source, weight=np.inf)
    monkeypatch.setattr(module, "import_tensorrt", FakeTensorrt)
    with raises_code("unsupported-graph", RunError) as excinfo:
        TensorrtStage()(artifact(source), TensorrtSettings(timing_cache=False), context(out, [3]))
    assert [(error.code, error.file) for error in excinfo.value.messages] == [
        ("tensorrt-infinite", "model.onnx")
    ]
    assert "'table' (float)" in str(excinfo.value)
    assert " 12 " in str(excinfo.value)
    assert list(out.iterdir()) == []


def test_lengths_beyond_position_table_are_rejected(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "import_tensorrt", FakeTensorrt)
    settings = TensorrtSettings(timing_cache=False, lengths={"opt": 8, "max": 32})
    with raises_code("unsupported-graph", RunError) as excinfo:
        TensorrtStage()(artifact(source), settings, context(out, [3]))
    assert set(message_codes(excinfo.value.messages)) == {"tensorrt-profile-too-long"}
    assert " 32 " in str(excinfo.value)
    assert " 16 " in str(excinfo.value)


def test_lengths_are_limited_by_positions_with_warning(source: Path, out: Path) -> None:
    ctx = context(out, [2] * 60 + [40])
    [ranges], limit = profile_ranges(source, TensorrtSettings(length_percentile=100), ctx)
    assert limit == 16
    assert ranges["input"] == SizeRange(1, 4, 16)
    assert message_codes(ctx.warnings) == ["longer-than-engine"]
    assert re.findall(r"\d+", ctx.warnings[0].message)[:3] == ["1", "61", "16"]


def test_missing_data_is_rejected_unless_lengths_are_set(source: Path, out: Path) -> None:
    with raises_code("missing-data", InputError) as excinfo:
        profile_ranges(source, TensorrtSettings(), context(out, []))
    assert "tensorrt: {lengths" in str(excinfo.value)
    settings = TensorrtSettings(lengths={"opt": 4, "max": 12})
    assert profile_ranges(source, settings, context(out, []))[0][0]["input"] == SizeRange(1, 4, 12)


@pytest.mark.parametrize(("wrong", "code"), [
    ({"optimization_level": 6}, "less_than_equal"), ({"fp16": True}, "extra_forbidden"),
    ({"hardware_compatibility": "turing"}, "literal_error"),
    ({"lengths": {"opt": 9, "max": 8}}, "opt-above-max"), ({"opt_batch_size": 9}, "opt-above-max"),
    ({"max_batch_size": 16, "profiles": [{"max_batch_size": 2, "opt_batch_size": 4}]}, "opt-above-max"),
    ({"profiles": [{"lengths": {"opt": 2, "max": 3}, "length_percentile": 60}]}, "settings-conflict"),
])  # fmt: skip
def test_settings_unsupported_by_tensorrt_11_are_rejected(wrong: dict[str, Any], code: str) -> None:
    with raises_setting_codes(code):
        TensorrtSettings.model_validate(wrong)
