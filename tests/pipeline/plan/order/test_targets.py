"""What a target that does not run the codes of a step is told of: ways out that are ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import mistakes, plan

from smelt.plan.order.targets import RUNTIMES
from smelt.runtime.schemes.scheme import TARGETS

pytest_plugins = ["planning"]


OPENVINO = ["int8-static", "int8-groupwise", "int4"]


@pytest.mark.parametrize("scheme", OPENVINO)
def test_of_a_vocabulary_that_a_target_does_not_run_its_scheme_alone_is_to_change(
    translator: Path, scheme: str
) -> None:
    stages = f"[quantize: {{scheme: {scheme}, vocabulary: WORD}}, onnx: {{target: openvino}}]"
    [told] = mistakes(translator, stages.replace("WORD", "int8-dynamic"))
    assert told == (
        "4: stages[1].onnx.target: OpenVINO cannot run the dynamic int8 of 'quantize'; give `from: model`, or"
        " target: ort-cpu, or 'quantize' `vocabulary: int8-static or int8-groupwise or int4`."
    )
    for word in OPENVINO:  # what it names is taken
        plan(translator, stages.replace("WORD", word))
    plan(translator, stages.replace("WORD", "int8-dynamic, embeddings: false, head: false"))  # unused


@pytest.mark.parametrize(
    ("codes", "way"),
    [
        ("scheme: int3", "or quantize with int8-static or int8-groupwise or int4."),
        ("scheme: binary", "or quantize with int8-static or int8-groupwise or int4."),
        ("scheme: int3, vocabulary: int4", "or quantize with int8-static or int8-groupwise or int4."),
        (
            "scheme: int3, vocabulary: int8-dynamic",
            "or quantize with int8-static or int8-groupwise or int4, without `vocabulary`.",
        ),
    ],
)
def test_of_layers_that_a_target_does_not_run_the_scheme_is_to_change(
    translator: Path, codes: str, way: str
) -> None:
    [told] = mistakes(translator, f"[quantize: {{{codes}}}, onnx: {{target: openvino}}]")
    assert told.endswith(way)


def test_a_target_without_any_scheme_names_none(translator: Path) -> None:
    [told] = mistakes(translator, "[quantize: {scheme: int4}, onnx: {target: ort-cuda}]")
    targets = "ort-cpu or tensorrt or openvino or ort-tensorrt-rtx"
    assert told.endswith(f"give `from: model`, or target: {targets}.")


def test_every_target_has_a_name() -> None:
    assert set(RUNTIMES) == set(TARGETS)
