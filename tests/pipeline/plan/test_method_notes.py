"""A method that does not suit the codes is noted before any work."""

from pathlib import Path

import pytest

from smelt.core.messages import message_codes
from tests.support.standins.stage_stand_ins import plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]


@pytest.mark.parametrize(("settings", "noted"), [
    ("scheme: int2, method: hqq", True), ("scheme: int3, method: hqq, embedding_scheme: int2", True),
    ("scheme: int3, method: hqq, embedding_scheme: int2, embeddings: false, output_layer: false", False),
    ("scheme: int3, method: hqq", False), ("scheme: int2, method: rtn", False),
    ("mixed_precision: {target_bits: 6.5}, method: hqq", False),
])  # fmt: skip
def test_hqq_at_two_bits_is_noted(translator: Path, settings: str, noted: bool) -> None:
    notes = plan_stages(translator, f"[quantize: {{{settings}}}]").notes
    assert ("hqq-two-bits" in message_codes(notes)) == noted


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ("scheme: binary, activation_bits: 4", True),
        ("scheme: int4, embedding_scheme: ternary, activation_bits: 4", True),
        ("scheme: binary, activation_bits: 8", False),
        ("scheme: binary", False),
    ],
)
def test_simulated_activations_are_noted(translator: Path, settings: str, noted: bool) -> None:
    notes = plan_stages(translator, f"[quantize: {{{settings}}}]").notes
    assert ("simulated-activations" in message_codes(notes)) == noted


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ("scheme: bnb-int8", True),
        ("scheme: int4, embedding_scheme: bnb-int8", True),
        ("scheme: bnb-nf4", False),
    ],
)
def test_weights_that_no_runtime_takes_are_noted_before_adapters_train(
    translator: Path, settings: str, noted: bool
) -> None:
    notes = plan_stages(translator, f"[quantize: {{{settings}}}, finetune: {{lora: {{}}}}]").notes
    assert ("torch-only" in message_codes(notes)) == noted
