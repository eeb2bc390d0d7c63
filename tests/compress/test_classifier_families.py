"""Every stage that works in torch, on every family of classifiers and every problem type."""

import classifiers
import harness
import pytest
import tiny
import torch
from expected_errors import raises_code
from transformers import AutoModelForSequenceClassification

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.core.errors import InputError
from smelt.data.examples import read_split
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.data.splits import Columns, Example
from smelt.models.checkpoint import load_model
from smelt.runtimes.predict_texts import class_logits
from smelt.runtimes.registry import open_runner

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
    classifiers.write_labelled_rows(folder / "data.jsonl", problem, pairs=True)
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
def test_finetuning_lowers_the_loss_of_each_problem_type(tmp_path, family, problem):
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


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_student_with_fewer_layers_learns_from_its_teacher(tmp_path, family, problem):
    source = make(tmp_path, family, problem)
    settings = DistillSettings(student={"layers": [1]}, losses={"logits": 1.0, "labels": 0.0}, **SHORT)
    ctx = context(tmp_path, source)
    model, _ = run(Distill, settings, source, ctx)
    assert model.config.num_hidden_layers == 1
    assert ctx.details["kept_layers"] == [1]
    layers = model.base_model.transformer.layer if family == "distilbert" else model.base_model.encoder.layer
    assert len(layers) == 1
    # the config says it, so transformers alone reads the student
    plain = AutoModelForSequenceClassification.from_pretrained(ctx.out)
    ids = torch.tensor([[2, 6, 7, 8, 3]])
    assert torch.equal(plain(ids).logits, model(ids).logits)


def test_a_student_that_equals_its_teacher_stays_where_it_is(tmp_path, family):
    """Only the teacher counts, so the loss begins at 0; Adam's steps have a size of their own."""
    source = make(tmp_path, family, MULTI_LABEL)
    ctx = context(tmp_path, source)
    settings = DistillSettings(losses={"logits": 1.0, "labels": 0.0}, dropout=0.0, weight_decay=0.0, **SHORT)
    run(Distill, settings, source, ctx)
    assert ctx.details["training"]["validation_loss"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("importance", ["taylor", "magnitude"])
def test_pruned_units_are_gone_and_the_rest_computes_as_with_zeros(tmp_path, family, importance):
    """Cutting a unit must equal leaving it in place with its outgoing weights at zero."""
    source = make(tmp_path, family)
    before, _ = load_model(source.path)
    ctx = context(tmp_path, source)
    settings = PruneSettings(
        targets=["heads", "ffn"],
        keep_ratio=0.5,
        importance=importance,
        calibration_samples=8,
        reconstruct=False,
    )
    model, edits = run(Prune, settings, source, ctx)
    assert set(ctx.details["kept_heads"].values()) == {2}
    assert set(ctx.details["kept_neurons"].values()) == {32}
    setting = "hidden_dim" if family == "distilbert" else "intermediate_size"
    assert getattr(model.config, setting) == 32
    assert {edit["op"] for edit in edits} == {"linear", "set"}  # heads; the width stands in the config
    kept = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in before.named_parameters():
            part = kept[name]
            if part.shape == whole.shape or whole.dim() < 2 or part.shape[1] == whole.shape[1]:
                continue
            # the columns that stayed are columns of the whole matrix; the others become zeros
            same = (part.T[:, None, :] == whole.T[None, :, :]).all(dim=2).any(dim=0)
            assert int(same.sum()) == part.shape[1]
            whole[:, ~same] = 0
    ids = torch.tensor([[2, 6, 7, 8, 3], [2, 9, 10, 11, 3]])
    assert torch.allclose(before(ids).logits, model(ids).logits, atol=1e-5)


def test_a_factorized_model_loads_as_it_was_and_keeps_its_classifier_whole(tmp_path, family):
    source = make(tmp_path, family)
    ctx = context(tmp_path, source)
    model, edits = run(Factorize, FactorizeSettings(method="svd", optimize_for="size", rank=8), source, ctx)
    assert len(edits) == 2 * (4 + 2)
    base = model.base_model_prefix
    assert all(edit["module"].startswith(f"{base}.") for edit in edits)
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]


def test_a_quantized_model_loads_as_it_was(tmp_path, family):
    from smelt.pipeline.recipe.stages import load_stage

    source = make(tmp_path, family)
    ctx = context(tmp_path, source)
    stage = load_stage("quantize")
    model, edits = run(stage, stage.settings_type(scheme="int8-dynamic"), source, ctx)
    assert {edit["op"] for edit in edits} == {"quantize"}
    assert ctx.details["float_linear_layers"] == []
    assert ctx.details["embeddings"] == 1
    off = (logits_of(ctx.out) - logits_of(source.path)).abs().mean() / logits_of(source.path).std()
    assert 0 < off < 0.2
    assert model.config.id2label == dict(enumerate(classifiers.CLASS_NAMES))


def test_a_teacher_of_another_problem_type_is_refused(tmp_path):
    one, other = make(tmp_path / "a", "roberta"), make(tmp_path / "b", "roberta", MULTI_LABEL)
    ctx = context(tmp_path / "a", one)
    ctx = harness.make_context(ctx.out, TASK, data=ctx.data, ancestors={"model": other}, score=ctx.score)
    with raises_code("problem-type-mismatch", InputError) as caught:
        Distill()(one, DistillSettings(**SHORT), ctx)
    assert "multi_label_classification" in str(caught.value)


def test_layers_have_the_same_word_in_all_families(tmp_path, family):
    source = make(tmp_path, family)
    with raises_code("unknown-stack", InputError) as caught:
        Distill()(source, DistillSettings(student={"encoder_layers": 1}, **SHORT), context(tmp_path, source))
    assert caught.value.setting == "student.encoder_layers"
    assert family in str(caught.value)
