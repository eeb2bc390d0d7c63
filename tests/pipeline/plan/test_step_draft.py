"""What other steps conclude of a quantize step: nothing where what chooses its codes is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.expected_errors import message_locations
from tests.support.standins.stage_stand_ins import plan_errors

pytest_plugins = ["tests.support.standins.stage_stand_ins"]


# settings that are wrong each; code and place of the one error; what is named in it
WRONG = [
    ("{mixed_precision: {target_bits: 3.5, bit_widths: [4, 8]}}",
     ("budget-out-of-range", "stages[0].quantize", 4), "3.5"),
    ("{mixed_precision: {bit_widths: [4]}}",
     ("wrong-value", "stages[0].quantize.mixed_precision.bit_widths", 4), "at least 2"),
    ("{mixed_precision: 3}", ("wrong-value", "stages[0].quantize.mixed_precision", 4), "target_bits"),
    ("{scheme: int4, granularity: tensor}", ("unused-setting", "stages[0].quantize", 4), "granularity"),
    ("{scheme: itn4}", ("wrong-value", "stages[0].quantize.scheme", 4), "'int4'?"),
    ("{schem: int4}", ("unknown-setting", "stages[0].quantize.schem", 4), "'scheme'?"),
    ("{scheme: int4, embedding_scheme: itn4}", ("wrong-value", "stages[0].quantize.embedding_scheme", 4),
     "'int4'?"),
    ("3", ("wrong-value", "stages[0].quantize", 4), "3"),
]  # fmt: skip


@pytest.mark.parametrize("later", [
    "onnx: {target: openvino}", "onnx: {target: tensorrt, dtype: fp16}", "finetune: {qat: {scales: lsq}}",
    "finetune: {qat: {weight_splitting: true}}",
])  # fmt: skip
@pytest.mark.parametrize(("settings", "location", "named"), WRONG)
def test_invalid_quantize_setting_gives_one_error(
    translator: Path, settings: str, location: tuple[str, str, int], named: str, later: str
) -> None:
    [error] = plan_errors(translator, f"[quantize: {settings}, {later}]")
    assert message_locations([error]) == [location]
    assert named in error.message


def test_errors_true_for_all_schemes_are_reported_despite_invalid_settings(translator: Path) -> None:
    later = ("already-quantized", "stages[1].factorize", 4)
    for settings in ("{mixed_precision: 3}", "{scheme: int4, granularity: tensor}", "{scheme: itn4}", "3"):
        errors = plan_errors(translator, f"[quantize: {settings}, factorize: {{}}]")
        assert message_locations(errors)[1:] == [later]
        assert "int4" not in errors[1].message
    # a scheme that is known is named, whatever else is wrong
    errors = plan_errors(translator, "[quantize: {scheme: int4, embedding_scheme: itn4}, factorize: {}]")
    assert message_locations(errors)[1:] == [later]
    assert "int4" in errors[1].message


def test_shortlist_is_not_checked_against_unknown_scheme(translator: Path) -> None:
    head, two = "[shortlist: {}, quantize: {scheme: bnb-nf4, output_layer: true", "}, onnx: {}]"
    errors = plan_errors(translator, f"{head}{two}")
    assert message_locations(errors) == [("unsupported-scheme", "stages[2].onnx", 4)]
    errors = plan_errors(translator, f"{head}, embedding_scheme: itn4{two}")
    assert message_locations(errors) == [("wrong-value", "stages[1].quantize.embedding_scheme", 4)]


def test_invalid_quantize_does_not_hide_errors_of_other_steps(translator: Path) -> None:
    """An error in one `quantize` hides nothing of another."""
    other_steps = "{quantize: {}, name: second, from: model}, finetune: {qat: {weight_splitting: true}}"
    errors = plan_errors(translator, f"[quantize: {{scheme: itn4}}, {other_steps}]")
    assert message_locations(errors)[1:] == [("unsupported-scheme", "stages[2].finetune", 4)]
    assert "int8-dynamic" in errors[1].message
