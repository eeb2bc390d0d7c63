"""Answers and graphs of models that mark spans equal those of transformers' models."""

import numpy as np
import pytest
import torch
import transformers

from smelt.data.splits import Example
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.runtimes.answer_questions import answer_questions
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import questions, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES

EXAMPLES = [Example("what is last ?", text_pair=text) for text in tiny.SENTENCES]
EXAMPLES.append(Example("who ?", text_pair=" ".join(tiny.SENTENCES * 3)))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("family", [name for name in questions.FAMILIES if name in DISTINCT_FAMILIES])
def test_onnx_logits_and_answers_equal_transformers(home, family):
    folder = questions.write_model(home / family, family)
    out = home / f"{family}-onnx"
    out.mkdir()
    harness.run_stage(Onnx(), OnnxSettings(target="ort-cpu"), folder, out, questions.TASK)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).requires_grad_(False)
    ids = torch.randint(5, 18, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
    types = (torch.arange(12) >= 5).long().expand(3, 12) * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family in ("bert", "electra", "albert"):
        inputs["token_type_ids"] = types
    outputs = model(**inputs)
    expected = torch.stack([outputs.start_logits, outputs.end_logits], -1)[mask.bool()]
    with open_folder(folder, "torch") as torch_runner, open_folder(out, "onnx", "ort-cpu") as onnx_runner:
        for runner in (torch_runner, onnx_runner):
            logits = runner.forward(Batch(ids.numpy(), mask.numpy(), types.numpy()))
            np.testing.assert_allclose(logits[mask.bool().numpy()], expected.numpy(), atol=2e-5)
        answers, onnx_answers = (
            answer_questions(runner, EXAMPLES, 4) for runner in (torch_runner, onnx_runner)
        )
    assert [a._replace(score=pytest.approx(a.score, abs=1e-5)) for a in answers] == onnx_answers
    assert len({answer.answer for answer in answers}) > 3
    assert all(e.text_pair[a.start : a.end] == a.answer for a, e in zip(answers, EXAMPLES, strict=True))


def test_long_context_is_read_in_windows(home):
    folder = questions.write_model(home / "bert")
    words = tiny.SENTENCES[0].split()
    context = " ".join(words * 30)
    with open_folder(folder, "torch") as runner:
        lengths = []
        forward = runner.forward
        runner.forward = lambda batch: lengths.extend(batch.attention_mask.sum(1)) or forward(batch)
        (answer,) = answer_questions(runner, [Example("who ?", text_pair=context)], may_be_unanswerable=False)
        assert len(lengths) > 5
        assert max(lengths) == runner.text.max_input_length
    assert context[answer.start : answer.end] == answer.answer != ""


@pytest.mark.parametrize(("examples", "code"), [
    ([], "empty-data"), ([Example("who ?")], "missing-context"),
])  # fmt: skip
def test_questions_need_contexts(home, examples, code):
    with open_folder(questions.write_model(home / "bert"), "torch") as runner, raises_code(code):
        answer_questions(runner, examples)


def test_non_finite_logits_are_refused(home):
    with open_folder(questions.write_model(home / "bert"), "torch") as runner:
        runner.forward = lambda batch: np.full((*batch.input_ids.shape, 2), np.nan, np.float32)
        with raises_code("non-finite-outputs"):
            answer_questions(runner, EXAMPLES)


def test_truncated_questions_are_counted(home):
    counts = []
    with open_folder(questions.write_model(home / "bert"), "torch") as runner:
        examples = [Example("who " * 90, text_pair="the cat " * 20), *EXAMPLES]
        answer_questions(runner, examples, on_truncate=lambda *count: counts.append(count))
        assert counts == [(1, runner.text.max_input_length)]
