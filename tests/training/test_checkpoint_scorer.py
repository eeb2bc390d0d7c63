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


def test_what_is_scored_is_the_model_of_the_moment_as_it_would_be_stored(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    seen = []

    def score(artifact, rows):
        seen.append((load_model(artifact.path)[0].classifier.weight.detach().clone(), rows, artifact.key))
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
    (first, rows, key), (second, _, other) = seen
    torch.testing.assert_close(second, first + 1.0, atol=2e-2, rtol=2e-2)
    assert rows is ROWS
    assert key != other
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.name for p in ctx.out.parent.iterdir()] == ["out"], "a checkpoint was left behind"


def test_a_metric_that_is_not_scored_is_named_with_those_that_are(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    ctx = context(tmp_path, lambda artifact, rows: {"accuracy": 50.0, "f1": 40.0})
    with raises_code("metric-not-scored", InputError) as caught:
        Finetune()(
            source, FinetuneSettings(metric_for_best_model="acuracy", max_steps=1, precision="fp32"), ctx
        )
    assert caught.value.setting == "metric_for_best_model"
    assert all(metric in str(caught.value) for metric in ("'acuracy'", "accuracy, f1", "'accuracy'"))


def test_validation_rows_are_needed_to_select_by_a_metric(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    ctx = context(tmp_path, lambda artifact, rows: {}, data={"train": ROWS})
    with raises_code("missing-data", InputError) as caught:
        Finetune()(source, FinetuneSettings(metric_for_best_model="f1"), ctx)
    assert caught.value.setting == "data.validation"


def test_the_checkpoint_with_the_best_score_is_written_and_the_scored_rows_are_those_of_the_loss(tmp_path):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    scores, seen = iter([1.0, 3.0, 2.0]), []

    def score(artifact, rows):
        seen.append((load_file(artifact.path / "model.safetensors"), rows))
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
    assert all(torch.equal(written[name], seen[1][0][name]) for name in written)
    assert not torch.equal(written["classifier.weight"], seen[2][0]["classifier.weight"])
    assert [len(rows) for _, rows in seen] == [6, 6, 6]


def test_a_model_that_trains_through_codes_is_scored_with_its_codes_and_trains_on(tmp_path):
    first = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), TASK)
    made = harness.make_context(tmp_path / "q", TASK)
    Quantize()(first, QuantizeSettings(scheme="binary", group_size=32), made)
    source = tiny.as_artifact(tmp_path / "q", TASK)
    seen = []

    def score(artifact, rows):
        seen.append(load_file(artifact.path / "model.safetensors"))
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
    assert final.keys() == seen[0].keys()
    assert all(torch.equal(final[name], seen[0][name]) for name in final)


@pytest.mark.parametrize("settings", [FinetuneSettings, DistillSettings])
def test_selecting_without_validations_is_refused(settings):
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
def test_a_run_selects_by_the_score_that_its_report_shows(tmp_path, monkeypatch, task, metric):
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
    best = max(training["validations"], key=lambda found: (found["score"], -found["loss"]))
    assert (training["kept_step"], len(training["validations"])) == (best["step"], 3)
    assert scored == [("model", 12), *[("checkpoint", 6)] * 3, ("finetune", 12)]


@pytest.mark.parametrize(
    ("task", "metric", "known"),
    [("translation", "bluw", "bleu"), ("translation", "accuracy", "loss"), (TASK, "bleu", "loss, accuracy")],
)
def test_the_plan_names_a_metric_that_is_not_scored(tmp_path, task, metric, known):
    from smelt.pipeline.plan.load_plan import load_plan

    (tiny.write_marian if task == "translation" else tiny.write_bert)(tmp_path / "model")
    (tiny.write_pairs if task == "translation" else tiny.write_labeled)(tmp_path / "rows.jsonl")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(task=task, metric=metric))
    with raises_code("metric-not-scored", InputError) as caught:
        load_plan(recipe)
    (found,) = caught.value.found
    assert found.setting == "stages[0].finetune.metric_for_best_model"
    assert f"'{metric}'" in found.message
    assert known in found.message
    recipe.write_text(
        RECIPE.format(task=task, metric="f1" if task == TASK else "bleu").replace(
            "validation: rows.jsonl,", ""
        )
    )
    with raises_code("missing-data", InputError):
        load_plan(recipe)
