"""A checkpoint that is chosen by a metric: scored as the artifact that would be written of it."""

import json

import pytest
import torch
from safetensors.torch import load_file

import smelt
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.qat import QuantizedWeights, convert_qat, load_trainable, mark_trained
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model, save_model
from smelt.pipeline.execute.scoring import Scorer
from smelt.training.checkpoints import CheckpointScorer
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import tiny

ROWS = Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES)))
TASK = "text-classification"


def context(folder, score, **more):
    values = {"task": TASK, "data": ROWS, "seed": 3}
    return harness.make_context(folder / "work" / "out", score=score, **(values | more))


def test_scored_checkpoint_equals_current_model_as_stored(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    scored = []

    def score(artifact, rows):
        scored.append((load_model(artifact.path)[0].classifier.weight.detach().clone(), rows, artifact.key))
        assert {p.name for p in artifact.path.iterdir()} == set(artifact.manifest.files)
        torch.rand(3)  # as a runner may draw
        assert load_file(artifact.path / "model.safetensors")["classifier.weight"].dtype == torch.bfloat16
        return {"accuracy": 12.5, "f1": 1.0}

    ctx = context(tmp_path, score)
    model, edits = load_model(source.path)
    settings = FinetuneSettings(metric_for_best_model="accuracy", dtype="bf16")
    judge = CheckpointScorer(model, edits, source, ROWS, settings, ctx)
    state = torch.get_rng_state()
    assert judge() == 12.5
    with torch.no_grad():
        model.classifier.weight.add_(1.0)
    assert judge() == 12.5
    (first, rows, key), (second, _, other) = scored
    torch.testing.assert_close(second, first + 1.0, atol=2e-2, rtol=2e-2)
    assert rows is ROWS
    assert key != other
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.name for p in ctx.out.parent.iterdir()] == ["out"], "a checkpoint was left behind"


def test_unscored_metric_is_rejected_with_available_metrics(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    ctx = context(tmp_path, lambda artifact, rows: {"accuracy": 50.0, "f1": 40.0})
    with raises_code("metric-not-scored", InputError) as caught:
        Finetune()(
            source, FinetuneSettings(metric_for_best_model="acuracy", max_steps=1, precision="fp32"), ctx
        )
    assert caught.value.setting == "metric_for_best_model"
    assert all(metric in str(caught.value) for metric in ("'acuracy'", "accuracy, f1", "'accuracy'"))


def test_metric_selection_without_validation_data_is_rejected(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    ctx = context(tmp_path, lambda artifact, rows: {}, data={"train": ROWS})
    with raises_code("missing-data", InputError) as caught:
        Finetune()(source, FinetuneSettings(metric_for_best_model="f1"), ctx)
    assert caught.value.setting == "data.validation"


def test_best_scored_checkpoint_is_saved(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    scores, scored = iter([1.0, 3.0, 2.0]), []

    def score(artifact, rows):
        scored.append((load_file(artifact.path / "model.safetensors"), rows))
        return {"f1": next(scores)}

    ctx = context(tmp_path, score)
    settings = FinetuneSettings(
        metric_for_best_model="f1",
        max_steps=4,
        num_evals=2,
        batch_size=4,
        precision="fp32",
        learning_rate=1e-3,
        max_validation_samples=6,
    )
    Finetune()(source, settings, ctx)
    assert ctx.details["training"]["kept_step"] == 2
    written = load_file(ctx.out / "model.safetensors")
    assert all(torch.equal(written[name], scored[1][0][name]) for name in written)
    assert not torch.equal(written["classifier.weight"], scored[2][0]["classifier.weight"])
    assert [len(rows) for _, rows in scored] == [6, 6, 6]


def test_qat_checkpoint_is_scored_quantized_and_training_continues(tmp_path):
    first = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    quantize_ctx = harness.make_context(tmp_path / "q", TASK)
    Quantize()(first, QuantizeSettings(scheme="binary", group_size=32), quantize_ctx)
    source = tiny.as_artifact(tmp_path / "q", TASK)
    scored = []

    def score(artifact, rows):
        scored.append(load_file(artifact.path / "model.safetensors"))
        return {"f1": 1.0}

    ctx = context(tmp_path, score)
    model, edits = load_trainable(source, ctx)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    names = [name for name, _ in model.named_modules()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with QuantizedWeights(model).extension().as_stored():
        CheckpointScorer(model, edits, source, ROWS, FinetuneSettings(metric_for_best_model="f1"), ctx)()
    assert [name for name, _ in model.named_modules()] == names
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    mark_trained(model)
    convert_qat(model, ctx)
    assert ctx.details["codes_changed"] > 0.5, "the layers of before were filled while the model was scored"
    save_model(model, edits, ctx.out, source.path)
    final = load_file(ctx.out / "model.safetensors")
    assert final.keys() == scored[0].keys()
    assert all(torch.equal(final[name], scored[0][name]) for name in final)


@pytest.mark.parametrize("settings", [FinetuneSettings, DistillSettings])
def test_metric_selection_without_evaluations_is_rejected(settings):
    with raises_setting_codes("no-evaluation"):
        settings(metric_for_best_model="bleu", num_evals=0)


RECIPE = """
model: model
task: {task}
data: {{train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}}
stages:
  - finetune: {{metric_for_best_model: {metric}, max_steps: 4, num_evals: 2, batch_size: 4, precision: fp32,
  max_validation_samples: 6}}
score: {{latency: false}}
"""


@pytest.mark.parametrize(("task", "metric"), [("translation", "chrf")])
def test_checkpoint_selection_uses_reported_metric(tmp_path, monkeypatch, task, metric):
    scored, real = [], Scorer.score

    def score(self, artifact, split, *args):
        scored.append((artifact.manifest.stage, len(split)))
        return real(self, artifact, split, *args)

    monkeypatch.setattr(Scorer, "score", score)
    (tiny.write_marian if task == "translation" else tiny.write_bert)(tmp_path / "model")
    (tiny.write_pairs if task == "translation" else tiny.write_labeled)(tmp_path / "rows.jsonl", rows=12)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(task=task, metric=metric))
    result = smelt.run(recipe, out=tmp_path / "run")
    (step,) = [s for s in result.report["steps"] if s["name"] == "finetune"]
    assert step["status"] == "done", step["error"]
    manifest = json.loads((tmp_path / "run" / "artifacts" / "finetune" / "manifest.json").read_text())
    training = manifest["details"]["training"]
    best = max(training["validations"], key=lambda item: (item["score"], -item["loss"]))
    assert (training["kept_step"], len(training["validations"])) == (best["step"], 3)
    assert scored == [("model", 12), *[("checkpoint", 6)] * 3, ("finetune", 12)]


@pytest.mark.parametrize(
    ("task", "metric", "known"),
    [("translation", "bluw", "bleu"), ("translation", "accuracy", "loss"), (TASK, "bleu", "loss, accuracy")],
)
def test_plan_rejects_unscored_metric(tmp_path, task, metric, known):
    from smelt.pipeline.plan.load_plan import load_plan

    (tiny.write_marian if task == "translation" else tiny.write_bert)(tmp_path / "model")
    (tiny.write_pairs if task == "translation" else tiny.write_labeled)(tmp_path / "rows.jsonl")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(task=task, metric=metric))
    with raises_code("metric-not-scored", InputError) as caught:
        load_plan(recipe)
    (error,) = caught.value.messages
    assert error.setting == "stages[0].finetune.metric_for_best_model"
    assert f"'{metric}'" in error.message
    assert known in error.message
    recipe.write_text(
        RECIPE.format(task=task, metric="f1" if task == TASK else "bleu").replace(
            "validation: rows.jsonl,", ""
        )
    )
    with raises_code("missing-data", InputError):
        load_plan(recipe)
