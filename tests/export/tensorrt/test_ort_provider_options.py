"""Options of ONNX Runtime's TensorRT provider: their names and spellings are those that it accepts."""

import json
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest

from smelt.core.errors import InputError, RunError
from smelt.core.messages import message_codes
from smelt.export.settings import OnnxSettings, ProviderSettings
from smelt.export.tensorrt.stage import export_provider_options, tensorrt_options
from smelt.runtimes.ort_tensorrt_backend import (
    ALLOWED_OPTIONS,
    engine_cache_root,
    parse_shapes,
    read_provider_options,
    with_cache_options,
)
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.graphs import graph_exports, tensorrt_graphs

SHAPES = {"input_ids": ((1, 1), (1, 8), (4, 32)), "past": ((1, 2, 0, 16), (1, 2, 4, 16), (4, 2, 11, 16))}
ALL = ProviderSettings(optimization_level=5, hardware_compatibility="ampere+", context_memory="shared")
TENSORRT = "TensorrtExecutionProvider"


def said_of(options: dict[str, str]) -> str:
    """Return what the parser in ONNX Runtime says of options; nothing where it takes them.

    It reads all of them before it looks for TensorRT's libraries, which are not here.
    """
    onnxruntime.set_default_logger_severity(4)
    try:
        onnxruntime.SessionOptions().add_provider(TENSORRT, options)
    except Exception as error:
        message = str(error)
        return "" if "Provider configuration is not supported" in message else message
    return ""


@pytest.mark.skipif(TENSORRT not in onnxruntime.get_available_providers(), reason="not in this ONNX Runtime")
def test_onnx_runtime_accepts_each_option(tmp_path: Path) -> None:
    for dtype in ("fp32", "fp16", "bf16"):
        options = with_cache_options(tensorrt_options(ALL, dtype, True, SHAPES), tmp_path, "model")
        assert said_of(options) == ""
        for name, value in options.items():
            assert "Invalid TensorRT EP option" in said_of({f"{name}s": value}), name
    assert "should be 'True' or 'False'" in said_of(options | {"trt_fp16_enable": "1"})
    assert said_of(options | {"trt_builder_optimization_level": "much"}) != ""


def test_provider_options_round_trip() -> None:
    limited = ALL.model_copy(update={"workspace_mib": 64})
    assert tensorrt_options(limited, "fp16", True, SHAPES).keys() == ALLOWED_OPTIONS
    assert tensorrt_options(limited, "fp16", True, SHAPES)["trt_max_workspace_size"] == str(64 * 2**20)


def test_options_contain_graph_precision_and_profile_sizes() -> None:
    precision_options = {
        dtype: [
            name.split("_")[1] for name, value in tensorrt_options(ALL, dtype, False, SHAPES).items()
            if value == "True" and name.split("_")[1] in ("fp16", "bf16", "int8", "layer")
        ]
        for dtype in ("fp32", "fp16", "bf16")
    }  # fmt: skip
    assert precision_options == {"fp32": [], "fp16": ["fp16", "layer"], "bf16": ["bf16"]}
    options = tensorrt_options(ALL, "fp32", True, SHAPES)
    assert options["trt_int8_enable"] == options["trt_engine_hw_compatible"] == "True"
    assert "trt_max_workspace_size" not in options  # the provider's own: no limit
    assert options["trt_sparsity_enable"] == "True"
    for bound_index, end in enumerate(("min", "opt", "max")):
        parsed_shapes = parse_shapes(options[f"trt_profile_{end}_shapes"])
        assert parsed_shapes == {name: sizes[bound_index] for name, sizes in SHAPES.items()}


def test_cache_options_are_machine_specific(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = tensorrt_options(ProviderSettings(), "fp32", False, SHAPES)
    cache_options = with_cache_options(options, tmp_path / "e", "decoder")
    assert {name: value for name, value in cache_options.items() if name not in options} == {
        "trt_engine_cache_enable": "True", "trt_engine_cache_path": str(tmp_path / "e"),
        "trt_engine_cache_prefix": "decoder", "trt_timing_cache_path": str(engine_cache_root()),
    }  # fmt: skip
    uncached_options = tensorrt_options(ProviderSettings(timing_cache=False), "fp32", False, SHAPES)
    assert "trt_timing_cache_path" not in with_cache_options(uncached_options, tmp_path, "g")
    assert with_cache_options(options, None, "g") == options  # a cache that cannot be written


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_options_file_contains_engine_profile(family: str, tmp_path: Path) -> None:
    folder = tensorrt_graphs.copy_graphs(family, tmp_path / "g")
    settings = ProviderSettings(max_batch_size=4, max_new_tokens=12)
    ctx = graph_exports.make_context(folder, graph_exports.FAMILIES[family][1])
    export_provider_options("fp32", settings, folder, ctx)
    assert json.loads((folder / "provider.json").read_text())["provider"] == TENSORRT
    graphs = tensorrt_graphs.graphs_with_shapes(
        family, folder
    )  # of the stage `tensorrt`, with the same settings
    options = read_provider_options(folder)
    assert set(options) == {path.stem for path in graphs}
    for path, [shapes] in graphs.items():
        assert options[path.stem].max_shapes == {name: sizes[2] for name, sizes in shapes.items()}


def test_missing_lengths_error_names_onnx_engine_setting(tmp_path: Path) -> None:
    folder = tensorrt_graphs.copy_graphs("marian", tmp_path / "g")
    ctx = graph_exports.make_context(folder, "translation")
    with raises_code("missing-data", InputError) as excinfo:
        export_provider_options("fp32", ProviderSettings(), folder, replace(ctx, data={}))
    assert "onnx: {engine: {lengths: {opt: 32, max: 128}}}" in str(excinfo.value)
    settings = ProviderSettings(max_batch_size=4, max_new_tokens=12, length_percentile=50)
    export_provider_options("fp32", settings, folder, ctx)
    assert message_codes(ctx.warnings) == ["longer-than-engine"]
    assert "onnx: {engine: {length_percentile, lengths}}" in ctx.warnings[0].message


def test_sizes_beyond_position_limit_are_rejected(tmp_path: Path) -> None:
    folder = tensorrt_graphs.copy_graphs("roberta", tmp_path / "g")
    settings = ProviderSettings.model_validate({"lengths": {"opt": 8, "max": 4000}})
    ctx = graph_exports.make_context(folder, "text-classification")
    with raises_code("does-not-fit-model", RunError) as excinfo:
        export_provider_options("fp32", settings, folder, ctx)
    assert excinfo.value.file == "model.onnx"
    assert set(message_codes(excinfo.value.messages)) == {"tensorrt-profile-too-long"}


@pytest.mark.parametrize(("settings", "code"), [
    ({"target": "ort-cuda", "engine": {}}, "unused-setting"),
    ({"target": "ort-tensorrt", "engine": {"opt_batch_size": 9}}, "opt-above-max"),
    ({"target": "ort-tensorrt", "threads": 2}, "unused-setting"),
    ({"target": "ort-tensorrt", "autotune": True}, "unused-setting"),
])  # fmt: skip
def test_incompatible_settings_are_rejected(settings: dict[str, object], code: str) -> None:
    with raises_setting_codes(code):
        OnnxSettings.model_validate(settings)
