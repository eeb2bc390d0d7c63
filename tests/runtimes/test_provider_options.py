"""The file next to graphs for the provider of TensorRT."""

import json
from pathlib import Path
from typing import Any

import pytest

from smelt.core.errors import InputError
from smelt.runtimes.ort_tensorrt_backend import (
    PROVIDER_OPTIONS_FILE,
    ProviderOptions,
    format_shapes,
    parse_shapes,
    read_provider_options,
    write_provider_options,
)
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

SHAPES = {"input_ids": (4, 32), "past_key_values.0.key": (4, 2, 0, 16), "odd:name": (1,)}
TOLD = ProviderOptions("a" * 64, {"trt_profile_max_shapes": format_shapes(SHAPES), "trt_fp16_enable": "True"})


def test_written_options_are_read_back(tmp_path: Path) -> None:
    write_provider_options(tmp_path, {"model": TOLD})
    assert read_provider_options(tmp_path) == {"model": TOLD}
    assert TOLD.max_shapes == SHAPES
    assert ProviderOptions("", {}).max_shapes == {}


def test_shapes_are_formatted_as_in_the_onnx_runtime_documentation() -> None:
    text = "input_ids:4x32,past_key_values.0.key:4x2x0x16,odd:name:1"
    assert format_shapes(SHAPES) == text
    assert parse_shapes(text) == SHAPES


@pytest.mark.parametrize(("change", "code", "named"), [
    ({"schema_version": 9}, "wrong-version", ""), ({"provider": "Nv"}, "wrong-provider", "Nv"),
    ({"graphs": [1]}, "damaged-file", ""),
    ({"graphs": {"model": {"sha256": "", "options": {"trt_profile_max_shapes": "x:1xa"}}}}, "damaged-file",
     ""),
    ({"graphs": {"model": {}}}, "damaged-file", "'sha256'"),
])  # fmt: skip
def test_damaged_file_is_reported(tmp_path: Path, change: dict[str, Any], code: str, named: str) -> None:
    write_provider_options(tmp_path, {"model": TOLD})
    content = json.loads((tmp_path / PROVIDER_OPTIONS_FILE).read_text()) | change
    (tmp_path / PROVIDER_OPTIONS_FILE).write_text(json.dumps(content))
    with raises_code(code, InputError) as caught:
        read_provider_options(tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "option", ["trt_extra_plugin_lib_paths", "trt_engine_cache_path", "user_compute_stream"]
)
def test_options_that_load_libraries_or_write_elsewhere_are_ignored(tmp_path: Path, option: str) -> None:
    write_provider_options(
        tmp_path, {"model": ProviderOptions("a" * 64, {**TOLD.options, option: "evil.so"})}
    )
    with raises_code("unknown-setting", InputError) as caught:
        read_provider_options(tmp_path)
    assert option in str(caught.value)


def test_deeply_nested_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / PROVIDER_OPTIONS_FILE).write_text("[" * 100_000)
    with raises_code("damaged-file", InputError) as caught:
        read_provider_options(tmp_path)
    assert PROVIDER_OPTIONS_FILE in str(caught.value)


def test_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with raises_code("missing-file", InputError) as caught:
        read_provider_options(tmp_path)
    assert PROVIDER_OPTIONS_FILE in str(caught.value)
