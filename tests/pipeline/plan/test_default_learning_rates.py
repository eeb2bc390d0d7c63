"""The learning rates that a plan tells are those that its trainings take."""

import json

import pytest

from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.models import causal, quantized_checkpoints, tiny

RECIPE = """\
model: model
task: translation
data: {train: rows.jsonl, test: rows.jsonl}
stages:
STAGES
score: {latency: false}
"""
SHORT = "max_steps: 1, batch_size: 2, precision: fp32, num_evals: 0"
CUT = "student: {encoder_layers: 1, decoder_layers: 1}"


def note(path):
    """Return what the plan of `path` notes on learning rates; empty for nothing."""
    messages = [
        message.message for message in load_plan(path).notes if message.code == "default-learning-rate"
    ]
    return messages[0].partition(": ")[2] if messages else ""


@pytest.fixture
def recipe(tmp_path):
    tiny.write_marian(tmp_path / "model")
    tiny.write_pairs(tmp_path / "rows.jsonl")

    def write(*stages):
        text = RECIPE.replace("STAGES", "\n".join(f"  - {stage}" for stage in stages))
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_planned_learning_rates_equal_rates_of_run(recipe, tmp_path):
    """32 wide: 2e-5 of 512 is 3.2e-4; ten times as much would be more than the highest."""
    path = recipe(
        f"finetune: {{{SHORT}}}", "quantize: {scheme: int2, embedding_scheme: int2}",
        f"distill: {{{SHORT}}}\n    name: through",
        f"distill: {{{SHORT}, {CUT}}}\n    name: shallow\n    from: finetune",
    )  # fmt: skip
    text = note(path)
    assert text == ("finetune 0.00032 (weights); through 0.001 (few bits); shallow 0.001 (fewer layers)")
    harness.smelt("run", path, "--out", tmp_path / "out", code=0)
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    learning_rates = {
        step["name"]: step["details"].get("training", {}).get("learning_rate") for step in report["steps"]
    }
    assert learning_rates["finetune"] == pytest.approx(3.2e-4)
    assert (learning_rates["through"], learning_rates["shallow"]) == (1e-3, 1e-3)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (["finetune: {learning_rate: 1.0e-3}"], ""),
        (["distill: {phases: [{losses: {logits: 1.0}, learning_rate: 1.0e-3}]}"], ""),
        (["distill: {phases: [{losses: {logits: 1.0}}]}"], "distill 0.00032 (weights)"),
        (["finetune: {lora: {}}"], "finetune 0.0004 (adapters)"),
        # the embedding may be most of it, in four bits
        (
            ["quantize: {scheme: int2}", "distill"],
            "distill 0.001 if most weights have fewer than four bits, else 0.00032",
        ),
        (["quantize: {scheme: int4}", "distill"], "distill 0.00032 (weights)"),
        (
            ["quantize: {scheme: int2, embedding_scheme: int2}", "finetune: {lora: {}}"],
            "finetune 0.0004 (adapters)",
        ),
        # how wide the model is then follows from what goes
        (["prune: {targets: [width], keep_ratio: 0.5}", "finetune"], ""),
        (["prune: {keep_ratio: 0.5}", "finetune"], "finetune 0.00032 (weights)"),
        (["distill: {student: other}", "finetune"], ""),
        (
            ["drop-layers: {decoder_layers: 1}", "distill", "prune: {keep_ratio: 0.5}", "finetune"],
            "distill 0.001 (fewer layers); finetune 0.001 (fewer layers)",
        ),
        (["distill: {student: {decoder_layers: 2}}"], "distill 0.00032 (weights)"),
    ],
)  # fmt: skip
def test_default_learning_rate_depends_on_trained_parameters(recipe, tmp_path, stages, expected):
    tiny.write_marian(tmp_path / "other")
    assert note(recipe(*stages)) == expected


def test_quantized_checkpoint_and_config_have_default_learning_rate(tmp_path):
    quantized_checkpoints.write_gptq(
        causal.write_model(tmp_path / "float", "llama"), tmp_path / "model", symmetric=False
    )
    causal.write_lines(tmp_path / "rows.txt", 1)
    text = RECIPE.replace("translation", "language-modeling").replace("STAGES", "  - finetune")
    text = text.replace("rows.jsonl}", "rows.txt, windows: {length: 32}}").replace("rows.jsonl", "rows.txt")
    for model in ("model: model", "model: {config: model, tokenizer: model}"):
        path = tmp_path / "recipe.yaml"
        path.write_text(text.replace("model: model", model), encoding="utf-8")
        assert note(path) == "finetune 0.001 (weights)"
