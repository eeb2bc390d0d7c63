"""An export that would measure and has nothing to choose from is told by the plan."""

import causal
import coded
import harness
import pytest

RECIPE = """\
model: MODEL
task: language-modeling
data: {train: train.txt, test: train.txt, windows: {length: 32}}
stages:
STAGES
score: {latency: false}
"""
TUNED = "onnx: {tune: true}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    coded.gptq(causal.model(folder / "float", "llama"), folder / "gptq", symmetric=False)
    causal.lines(folder / "train.txt", 1)
    return folder


def told(folder, *stages, model="float"):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", model).replace("STAGES", "\n".join(f"  - {s}" for s in stages)))
    return " ".join(harness.smelt("plan", path).output.split())


def test_float_products_have_one_operator(folder):
    text = told(folder, "prune: {what: [ffn], importance: magnitude}", TUNED)
    assert "line 6: onnx: tune chooses between operators of codes, and nothing is quantized before it" in text
    assert "nothing is quantized" not in told(folder, "onnx: {}")


@pytest.mark.parametrize(
    ("scheme", "chooses"),
    [
        ("{scheme: int8-dynamic}", True),
        ("{scheme: int4}", True),
        ("{scheme: int4, accuracy_level: 0}", False),
        ("{scheme: int8-groupwise}", False),
        ("{scheme: pow2}", False),
        ("{scheme: pow2, vocabulary: int4}", True),
        ("{bits: {budget: 4.5}}", True),
    ],
)
def test_codes_that_leave_as_one_operator_alone(folder, scheme, chooses):
    text = told(folder, f"quantize: {scheme}", "finetune: {}", TUNED)
    assert ("nothing is chosen" in text) != chooses
    assert "nothing is quantized" not in text
    assert ("as 'quantize' makes them leave as one operator alone" in text) != chooses


def test_of_a_model_that_nobody_has_looked_at_nothing_is_said(folder):
    assert "tune" not in told(folder, TUNED, model="somebody/model").partition("warning")[2]
    (folder / "artifact").mkdir()
    for path in (folder / "float").iterdir():
        (folder / "artifact" / path.name).write_bytes(path.read_bytes())
    edit = '{"schema": 1, "edits": [{"op": "quantize", "module": "lm_head", "scheme": "int4"}]}'
    (folder / "artifact" / "structure.json").write_text(edit)
    assert "tune" not in told(folder, "onnx: {tune: true}", model="artifact").partition("warning")[2]


def test_codes_of_a_checkpoint_count_and_those_of_another_student_do_not(folder):
    assert "tune" not in told(folder, TUNED, model="gptq").partition("warning")[2]
    other = "distill: {student: {model: float}}"
    assert "nothing is quantized before it" in told(folder, "quantize: {scheme: int4}", other, TUNED)
