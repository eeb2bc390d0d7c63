"""Every stage that works in torch, on every family of classifiers and every problem type."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.errors import InputError
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.data.splits import Columns, Example
from smelt.models.checkpoint import load_model
from smelt.runtimes.predict_texts import class_logits
from smelt.runtimes.registry import open_runner
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import classifiers, tiny

TASK = "text-classification"
SHORT = {"max_steps": 3, "batch_size": 4, "num_evals": 1, "precision": "fp32"}
PROBLEMS = [SINGLE_LABEL, MULTI_LABEL, REGRESSION]


@pytest.fixture(scope="module", params=classifiers.MAKERS)
def family(request):
    return request.param


def make(folder, family, problem=SINGLE_LABEL):
    outputs = {"labels": 1} if problem == REGRESSION else {"labels": 3}
    if problem != REGRESSION:
        outputs["id2label"] = dict(enumerate(classifiers.CLASS_NAMES))
    classifiers.MAKERS[family](folder / "m", problem_type=problem, **outputs)
    classifiers.write_labeled_rows(folder / "data.jsonl", problem, pairs=True)
    return tiny.as_artifact(folder / "m", TASK)


def context(folder, source, name="out"):
    out = folder / name
    out.mkdir()
    split = read_split("data.jsonl", TASK, Columns(), folder)
    data = {"train": split, "validation": split}
    return harness.make_context(out, TASK, data=data, ancestors={"model": source})


def logits_of(folder):
    with open_runner(tiny.as_artifact(folder, TASK)) as runner:
        return torch.from_numpy(class_logits(runner, [Example(text) for text in tiny.SENTENCES]))


def run(stage, settings, source, ctx):
    stage()(source, settings, ctx)
    model, edits = load_model(ctx.out)
    assert torch.isfinite(logits_of(ctx.out)).all()
    return model, edits


@pytest.mark.parametrize(("family", "problem"), list(zip(classifiers.MAKERS, PROBLEMS, strict=True)))
def test_finetuning_lowers_loss_of_each_problem_type(tmp_path, family, problem):
    source = make(tmp_path, family, problem)
    losses = []
    for steps in (1, 12):
        ctx = context(tmp_path, source, f"out{steps}")
        settings = FinetuneSettings(**SHORT | {"max_steps": steps, "learning_rate": 0.01, "dropout": 0.0})
        model, _ = run(Finetune, settings, source, ctx)
        losses.append(ctx.details["training"]["validation_loss"])
    assert losses[1] < losses[0]
    assert model.config.problem_type == problem
    plain = AutoModelForSequenceClassification.from_pretrained(ctx.out)
    ids = torch.tensor([[2, 6, 7, 8, 3]])
    assert torch.equal(plain(ids).logits, model(ids).logits)


def test_teacher_with_different_problem_type_is_rejected(tmp_path):
    student, teacher = make(tmp_path / "a", "roberta"), make(tmp_path / "b", "roberta", MULTI_LABEL)
    ctx = context(tmp_path / "a", student)
    ctx = harness.make_context(ctx.out, TASK, data=ctx.data, ancestors={"model": teacher}, score=ctx.score)
    with raises_code("problem-type-mismatch", InputError) as caught:
        Distill()(student, DistillSettings(**SHORT), ctx)
    assert "multi_label_classification" in str(caught.value)
