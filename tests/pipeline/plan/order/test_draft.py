"""What other steps conclude of a quantize step: nothing where what chooses its codes is a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import mistakes

pytest_plugins = ["planning"]


# settings that are wrong each, which of them, and that alone is to be said of them
WRONG = [
    ("{bits: {budget: 3.5, widths: [4, 8]}}", "bits: budget 3.5"),
    ("{bits: {widths: [4]}}", "a list of at least 2"),
    ("{bits: 3}", "expected a mapping with budget"),
    ("{scheme: int4, codebook_inputs: 128}", "codebook_inputs means nothing to scheme int4"),
    ("{scheme: itn4}", "Did you mean 'int4'?"),
    ("{schem: int4}", "Did you mean 'scheme'?"),
    ("{scheme: int4, vocabulary: itn4}", "Did you mean 'int4'?"),
    ("3", "expected a mapping of settings, read 3"),
]


@pytest.mark.parametrize(
    "later",
    [
        "onnx: {target: openvino}",
        "onnx: {target: tensorrt, dtype: fp16}",
        "finetune: {codes: {scales: lsq}}",
        "finetune: {codes: {split: true}}",
        "finetune: {codes: {activations: one-bit}}",
    ],
)
@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_mistake_in_quantize_is_one_mistake(
    translator: Path, settings: str, message: str, later: str
) -> None:
    [told] = mistakes(translator, f"[quantize: {settings}, {later}]")
    assert message in told


def test_what_holds_for_all_codes_is_still_said(translator: Path) -> None:
    for settings, _ in WRONG:
        first, second = mistakes(translator, f"[quantize: {settings}, onnx: {{target: ort-cuda}}]")
        assert "stages[0].quantize" in first
        assert "ONNX Runtime on CUDA cannot run the quantized layers of 'quantize'" in second
    for settings in ("{bits: 3}", "{scheme: int4, codebook_inputs: 128}", "{scheme: itn4}", "3"):
        told = mistakes(translator, f"[quantize: {settings}, factorize: {{}}]")
        assert "factorize cannot work after 'quantize', which left quantized codes" in told[1]
    # a scheme that is known is named, whatever is wrong beside it
    told = mistakes(translator, "[quantize: {scheme: int4, vocabulary: itn4}, factorize: {}]")
    assert "which left int4 codes" in told[1]


def test_a_shortlist_is_not_told_of_codes_that_nobody_knows(translator: Path) -> None:
    one, two = "[shortlist: {}, quantize: {scheme: bnb-nf4", "}, onnx: {}]"
    assert "restrict an output layer of bnb-nf4 codes" in mistakes(translator, f"{one}{two}")[0]
    [told] = mistakes(translator, f"{one}, vocabulary: itn4{two}")
    assert "Did you mean 'int4'?" in told


def test_other_steps_are_judged_by_codes_that_are_known(translator: Path) -> None:
    """A mistake in one `quantize` hides nothing of another."""
    again = "{quantize: {}, name: second, from: model}, finetune: {codes: {split: true}}"
    told = mistakes(translator, f"[quantize: {{scheme: itn4}}, {again}]")
    assert len(told) == 2
    assert "those before it are int8-dynamic" in told[1]
