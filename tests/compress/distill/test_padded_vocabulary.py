"""Teachers and students of one tokenizer whose matrices are padded to different numbers of rows."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.distill.teachers import map_teacher_tokens
from smelt.core.errors import InputError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, tiny

TOKENS = 320
SHORT = {"max_steps": 2, "batch_size": 4, "num_evals": 0, "precision": "fp32"}


@pytest.fixture
def write_qwen(tmp_path):
    def write(name, rows, seed=0):
        return causal.write_model(tmp_path / name, "qwen2", seed=seed, vocab_size=rows)

    return write


def test_padded_teacher_rows_have_zero_probability(write_qwen):
    folder, student_folder = write_qwen("teacher", 352), write_qwen("student", 328, 1)
    teacher, original, student = load_model(folder)[0], load_model(folder)[0], load_model(student_folder)[0]
    ids = torch.randint(0, TOKENS, (2, 7))
    assert map_teacher_tokens(teacher, folder, student, student_folder) == list(range(328))
    with torch.no_grad():
        logits, expected = teacher(input_ids=ids).logits, original(input_ids=ids).logits
    probabilities = expected.softmax(-1)[..., :328]
    assert torch.allclose(logits.softmax(-1), probabilities / probabilities.sum(-1, keepdim=True), atol=1e-6)
    assert teacher.config.vocab_size == student.config.vocab_size


def test_rows_missing_from_teacher_get_zero_probability(write_qwen):
    folder, student_folder = write_qwen("teacher", TOKENS), write_qwen("student", 352, 1)
    teacher, original, student = load_model(folder)[0], load_model(folder)[0], load_model(student_folder)[0]
    ids = torch.randint(0, TOKENS, (2, 7))
    assert map_teacher_tokens(teacher, folder, student, student_folder) == [*range(TOKENS), *[-1] * 32]
    with torch.no_grad():
        probabilities = teacher(input_ids=ids).logits.softmax(-1)
        expected = original(input_ids=ids).logits.softmax(-1)
        student_logits = student(input_ids=ids).logits
    assert torch.allclose(probabilities, F.pad(expected, (0, 32)), atol=1e-7)
    assert probabilities[..., TOKENS:].max() == 0
    assert torch.isfinite(F.kl_div(student_logits.log_softmax(-1), probabilities, reduction="sum"))


@pytest.mark.parametrize("padded", ["teacher", "student"])
def test_student_learns_from_teacher_with_different_padding(tmp_path, write_qwen, padded):
    rows = read_split(str(causal.write_prompts(tmp_path / "p.jsonl")), "text-generation", Columns(), tmp_path)
    sizes = (352, 328) if padded == "teacher" else (328, 352)
    teacher, student = write_qwen("teacher", sizes[0]), write_qwen("student", sizes[1], 1)
    for folder in (teacher, student):
        (folder / "text.json").write_text('{"prompt_template": "{prompt}"}')
    settings = DistillSettings.model_validate(
        {"teacher": {"model": str(teacher)}, "losses": {"logits": 1.0, "reverse_kl": 0.5}} | SHORT
    )
    ctx = harness.run_stage(Distill(), settings, student, tmp_path / "out", "text-generation", rows)
    assert ctx.details["words_of_teacher"] == 328
    assert harness.load_output_model(ctx).config.vocab_size == sizes[1]
    external = DistillSettings.model_validate({"student": str(student)} | SHORT)
    errors, config = Distill.check_model(external, {"model_type": "qwen2", "vocab_size": sizes[0]})
    assert (errors, config["vocab_size"]) == ([], sizes[1])
    ctx = harness.run_stage(Distill(), external, teacher, tmp_path / "second", "text-generation", rows)
    assert harness.load_output_model(ctx).config.vocab_size == sizes[1]


def test_extra_rows_with_real_tokens_are_rejected(tmp_path, write_qwen):
    rows = read_split(str(causal.write_prompts(tmp_path / "p.jsonl")), "text-generation", Columns(), tmp_path)
    source, small = write_qwen("source", 352), write_qwen("small", 200, 1)
    (source / "text.json").write_text('{"prompt_template": "{prompt}"}')
    ancestors = {name: tiny.as_artifact(f, "text-generation") for name, f in (("a", source), ("b", small))}
    ctx = harness.make_context(tmp_path / "out", "text-generation", rows, ancestors=ancestors)
    with raises_code("vocabulary-mismatch", InputError):
        Distill()(ancestors["a"], DistillSettings(teacher="b"), ctx)
    external = DistillSettings.model_validate({"student": str(small)})
    (error,), _ = Distill.check_model(external, {"model_type": "qwen2", "vocab_size": 352})
    assert error.code == "vocabulary-mismatch"
