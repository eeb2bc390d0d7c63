"""What a target that does not run the codes of a step is told of: ways out that are ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.pipeline.plan.step_draft import RUNTIME_NAMES
from smelt.quantization.scheme import EXPORT_TARGETS
from tests.support.expected_errors import message_locations
from tests.support.standins.stage_stand_ins import plan_errors, plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]


OPENVINO = ["int8-static", "int8-groupwise", "int4"]


@pytest.mark.parametrize("scheme", OPENVINO)
def test_unsupported_embedding_scheme_suggests_changing_only_it(translator: Path, scheme: str) -> None:
    stages = f"[quantize: {{scheme: {scheme}, embedding_scheme: WORD}}, onnx: {{target: openvino}}]"
    [error] = plan_errors(translator, stages.replace("WORD", "int8-dynamic"))
    assert message_locations([error]) == [("unsupported-scheme", "stages[1].onnx.target", 4)]
    ways = ("`from: model`", "target: ort-cpu,", "`embedding_scheme: int8-static or int8-groupwise or int4`.")
    assert [way for way in ways if way not in error.message] == []
    for scheme_name in OPENVINO:  # what it names is taken
        plan_stages(translator, stages.replace("WORD", scheme_name))
    plan_stages(
        translator, stages.replace("WORD", "int8-dynamic, embeddings: false, output_layer: false")
    )  # unused


@pytest.mark.parametrize(("codes", "way"), [
    ("scheme: int3", "with int8-static or int8-groupwise or int4."),
    ("scheme: binary", "with int8-static or int8-groupwise or int4."),
    ("scheme: int3, embedding_scheme: int4", "with int8-static or int8-groupwise or int4."),
    ("scheme: int3, embedding_scheme: int8-dynamic",
     "with int8-static or int8-groupwise or int4, without `embedding_scheme`."),
])  # fmt: skip
def test_unsupported_layer_scheme_suggests_changing_it(translator: Path, codes: str, way: str) -> None:
    [error] = plan_errors(translator, f"[quantize: {{{codes}}}, onnx: {{target: openvino}}]")
    assert message_locations([error]) == [("unsupported-scheme", "stages[1].onnx.target", 4)]
    assert error.message.endswith(way)


def test_scheme_that_runs_only_with_an_option_names_it(translator: Path) -> None:
    [error] = plan_errors(translator, "[quantize: {scheme: int4}, onnx: {target: ort-cuda}]")
    assert message_locations([error]) == [("unsupported-options", "stages[1].onnx.target", 4)]
    assert "accuracy_level: 0" in error.message


def test_every_target_has_a_name() -> None:
    assert set(RUNTIME_NAMES) == set(EXPORT_TARGETS)
