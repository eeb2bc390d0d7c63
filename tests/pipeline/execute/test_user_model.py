"""What is told of an untouched model: bits of the codes that it has already, as a step would tell them."""

import json

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from tests.support import harness
from tests.support.models import causal, every_family, quantized_checkpoints

RECIPE = """\
model: m
task: language-modeling
data: {train: t.txt, test: t.txt, windows: {length: 32}}
stages: [onnx: {generation_graph: false}]
score: {latency: false}
"""


def _told(home):
    causal.write_lines(home / "t.txt", 1)
    (home / "recipe.yaml").write_text(RECIPE)
    harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet", "--until", "model", code=0)
    report = json.loads((home / "run" / "report.json").read_text())
    return report["steps"][0]["details"], (home / "run" / "report.md").read_text()


def _rows(width, group, zeros):
    """Bytes of a row of 4-bit codes: two in a byte, a float16 a group, two zero points in a byte."""
    groups = width // group
    return width / 2 + 2 * groups + (-(-groups // 2) if zeros else 0)


@pytest.mark.parametrize(("method", "zeros"), [("gptq", False), ("awq", True)])
def test_bits_per_weight_of_quantized_checkpoint(tmp_path, method, zeros):
    source = causal.write_model(tmp_path / "float", "llama")
    getattr(quantized_checkpoints, f"write_{method}")(source, tmp_path / "m", group=32)
    details, text = _told(tmp_path)
    # of each block: query and output 64 x 64, key and value 32 x 64, gate and up 96 x 64, down 64 x 96
    narrow = 64 + 64 + 32 + 32 + 96 + 96
    total_bits = 8 * (narrow * _rows(64, 32, zeros) + 64 * _rows(96, 32, zeros))
    expected_bits = total_bits / (narrow * 64 + 64 * 96)
    assert (expected_bits == 4.5) is not zeros
    assert details["bits_per_weight"] == pytest.approx(expected_bits, abs=5e-4)
    assert "| bits per weight |" in text
    assert f"| {details['bits_per_weight']} |" in text


def test_bits_per_weight_of_quantized_artifact_equal_its_step(tmp_path):
    source = causal.write_model(tmp_path / "float", "llama")
    artifact = every_family.run_stage(
        Quantize(), QuantizeSettings(scheme="int3"), source, "llama", tmp_path / "m"
    )
    details, _ = _told(tmp_path)
    assert details["bits_per_weight"] == artifact.details["bits_per_weight"]


def test_float_model_has_no_bits_per_weight(tmp_path):
    causal.write_model(tmp_path / "m", "llama")
    details, text = _told(tmp_path)
    assert "bits_per_weight" not in details
    assert "bits per weight" not in text
