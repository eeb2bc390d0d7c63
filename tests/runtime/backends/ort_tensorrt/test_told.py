"""The file beside graphs for a provider of TensorRT."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from smelt.core.errors import InputError
from smelt.runtime.backends.ort_tensorrt.told import (
    FILE,
    Told,
    read_told,
    shapes_as_text,
    shapes_from,
    write_told,
)

NAME = "TensorrtExecutionProvider"
SHAPES = {"input_ids": (4, 32), "past_key_values.0.key": (4, 2, 0, 16), "odd:name": (1,)}
TOLD = Told("a" * 64, {"trt_profile_max_shapes": shapes_as_text(SHAPES), "trt_fp16_enable": "True"})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_told(tmp_path, NAME, {"model": TOLD})
    assert read_told(tmp_path, NAME) == {"model": TOLD}
    assert TOLD.most == SHAPES
    assert Told("", {}).most == {}


def test_shapes_are_spelled_as_onnx_runtimes_documentation_has_them() -> None:
    text = "input_ids:4x32,past_key_values.0.key:4x2x0x16,odd:name:1"
    assert shapes_as_text(SHAPES) == text
    assert shapes_from(text) == SHAPES


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"schema_version": 9}, "wrong-version", ""),
        ({"provider": "Nv"}, "wrong-provider", "Nv"),
        ({"graphs": [1]}, "damaged-file", ""),
        (
            {"graphs": {"model": {"sha256": "", "options": {"trt_profile_max_shapes": "x:1xa"}}}},
            "damaged-file",
            "",
        ),
        ({"graphs": {"model": {}}}, "damaged-file", "'sha256'"),
    ],
)
def test_damage_is_told(tmp_path: Path, change: dict[str, Any], code: str, named: str) -> None:
    write_told(tmp_path, NAME, {"model": TOLD})
    said = json.loads((tmp_path / FILE).read_text()) | change
    (tmp_path / FILE).write_text(json.dumps(said))
    with refused(code, InputError) as caught:
        read_told(tmp_path, NAME)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "option", ["trt_extra_plugin_lib_paths", "trt_engine_cache_path", "user_compute_stream"]
)
def test_options_that_load_libraries_or_write_elsewhere_are_not_passed_on(
    tmp_path: Path, option: str
) -> None:
    write_told(tmp_path, NAME, {"model": Told("a" * 64, {**TOLD.options, option: "evil.so"})})
    with refused("unknown-setting", InputError) as caught:
        read_told(tmp_path, NAME)
    assert option in str(caught.value)


def test_a_file_that_nests_without_end_is_damaged(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[" * 100_000)
    with refused("damaged-file", InputError) as caught:
        read_told(tmp_path, NAME)
    assert FILE in str(caught.value)


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with refused("missing-file", InputError) as caught:
        read_told(tmp_path, NAME)
    assert FILE in str(caught.value)
