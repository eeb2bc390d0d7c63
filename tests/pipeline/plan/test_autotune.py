"""An export that would measure and has nothing to choose from is told by the plan."""

import causal
import pytest
import quantized_checkpoints

from smelt.core.messages import message_codes
from smelt.pipeline.plan.load_plan import load_plan

RECIPE = """\
model: MODEL
task: language-modeling
data: {train: train.txt, test: train.txt, windows: {length: 32}}
stages:
STAGES
score: {latency: false}
"""
TUNED = "onnx: {autotune: true}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    quantized_checkpoints.write_gptq(
        causal.write_model(folder / "float", "llama"), folder / "gptq", symmetric=False
    )
    causal.write_lines(folder / "train.txt", 1)
    return folder


def autotune_warnings(folder, *stages, model="float"):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", model).replace("STAGES", "\n".join(f"  - {s}" for s in stages)))
    """Return the warnings of the plan on `tune`."""
    return [one for one in load_plan(path).warnings if one.setting == "autotune"]


def test_float_products_have_one_operator(folder):
    (found,) = autotune_warnings(folder, "prune: {targets: [ffn], importance: magnitude}", TUNED)
    assert (found.code, found.line, found.step) == ("nothing-quantized", 6, "onnx")
    assert autotune_warnings(folder, "onnx: {}") == []


@pytest.mark.parametrize(
    ("scheme", "chooses"),
    [
        ("{scheme: int8-dynamic}", True),
        ("{scheme: int4}", True),
        ("{scheme: int4, accuracy_level: 0}", False),
        ("{scheme: int8-groupwise}", False),
        ("{scheme: pow2}", False),
        ("{scheme: pow2, embedding_scheme: int4}", True),
        ("{mixed_precision: {target_bits: 4.5}}", True),
    ],
)
def test_codes_that_leave_as_one_operator_alone(folder, scheme, chooses):
    found = autotune_warnings(folder, f"quantize: {scheme}", "finetune: {}", TUNED)
    assert message_codes(found) == ([] if chooses else ["nothing-to-tune"])
    assert all("'quantize'" in one.message for one in found)


def test_of_a_model_that_nobody_has_looked_at_nothing_is_said(folder):
    assert autotune_warnings(folder, TUNED, model="somebody/model") == []
    (folder / "artifact").mkdir()
    for path in (folder / "float").iterdir():
        (folder / "artifact" / path.name).write_bytes(path.read_bytes())
    edit = '{"schema": 1, "edits": [{"op": "quantize", "module": "lm_head", "scheme": "int4"}]}'
    (folder / "artifact" / "structure.json").write_text(edit)
    assert autotune_warnings(folder, "onnx: {autotune: true}", model="artifact") == []


def test_codes_of_a_checkpoint_count_and_those_of_another_student_do_not(folder):
    assert autotune_warnings(folder, TUNED, model="gptq") == []
    other = "distill: {student: {model: float}}"
    assert message_codes(autotune_warnings(folder, "quantize: {scheme: int4}", other, TUNED)) == [
        "nothing-quantized"
    ]
