"""Every stage that works in torch on sentence embedders: what comes out makes vectors of length 1 again."""

import numpy as np
import pytest

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.errors import InputError
from smelt.data.splits import Columns, Split
from smelt.models.checkpoint import load_model
from smelt.runtimes.predict_texts import embed_texts
from smelt.runtimes.registry import open_folder
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import embedders, tiny

SHORT = {"max_steps": 3, "batch_size": 4, "num_evals": 1, "precision": "fp32"}
STAGES = {
    "distill": (Distill, DistillSettings(student={"layers": 1}, **SHORT)),
    "prune": (Prune, PruneSettings(keep_ratio=0.5, calibration_samples=8, batch_size=4)),
    "int4": (Quantize, QuantizeSettings(scheme="int4", group_size=32)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = embedders.write_embedder(tmp_path_factory.mktemp("bert") / "m", num_hidden_layers=3)
    return tiny.as_artifact(folder, embedders.TASK)


def context(folder, source, teacher=None, **options):
    split = read_split(
        str(embedders.write_rows(folder / "rows.jsonl", **options)), embedders.TASK, Columns(), folder
    )
    return harness.make_context(folder / "out", embedders.TASK, split, ancestors={"model": teacher or source})


def vectors(folder):
    with open_folder(folder, "torch") as runner:
        return embed_texts(runner, tiny.SENTENCES)


@pytest.mark.parametrize("name", ["distill", "prune", "int4"])
def test_stage_output_is_an_embedder(name, source, tmp_path):
    stage, settings = STAGES[name]
    ctx = context(tmp_path, source)
    stage()(source, settings, ctx)
    embeddings = vectors(ctx.out)
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    assert np.abs(embeddings - vectors(source.path)).max() > 1e-6
    assert (ctx.out / "modules.json").is_file()
    config = load_model(ctx.out)[0].config
    assert config.architectures == ["BertModel"]


def test_training_on_scores_lowers_loss(source, tmp_path):
    ctx = context(tmp_path, source)
    settings = FinetuneSettings(max_steps=30, batch_size=8, learning_rate=1e-3, num_evals=1, precision="fp32")
    Finetune()(source, settings, ctx)
    before, *_, after = [v["loss"] for v in ctx.details["training"]["validations"]]
    assert after < 0.75 * before


def test_student_approaches_teacher_without_scores(source, tmp_path):
    """Three layers become one; texts alone are enough."""
    ctx = context(tmp_path, source, scores=False, paired=False)
    settings = DistillSettings(
        student={"layers": 1}, max_steps=60, batch_size=8, learning_rate=3e-3, num_evals=1, precision="fp32"
    )
    Distill()(source, settings, ctx)
    before, *_, after = [v["loss"] for v in ctx.details["training"]["validations"]]
    assert after < 0.5 * before
    close = np.mean(np.sum(vectors(ctx.out) * vectors(source.path), axis=1))
    assert close > 0.8


def test_untrained_student_has_zero_loss(source, tmp_path):
    ctx = context(tmp_path, source)
    Distill()(source, DistillSettings(dropout=0.0, weight_decay=0.0, **SHORT), ctx)
    assert ctx.details["training"]["validations"][0]["loss"] == pytest.approx(0, abs=1e-9)


def test_teacher_of_different_width_requires_similarity_loss(source, tmp_path):
    wide = tiny.as_artifact(embedders.write_embedder(tmp_path / "wide", hidden_size=64), embedders.TASK)
    ctx = context(tmp_path, source, wide)
    with raises_code("width-mismatch", InputError) as caught:
        Distill()(source, DistillSettings(**SHORT), ctx)
    assert caught.value.setting == "losses.sentence_embedding"
    assert all(width in str(caught.value) for width in ("64", "32"))
    Distill()(source, DistillSettings(losses={"sentence_embedding": 0}, **SHORT), ctx)
    assert vectors(ctx.out).shape[1] == 32


@pytest.mark.parametrize(
    ("stage", "settings", "setting"),
    [(Finetune, FinetuneSettings(**SHORT), None), (Prune, PruneSettings(), "importance")],
)
def test_missing_scores_are_rejected_if_loss_needs_them(stage, settings, setting, source, tmp_path):
    with raises_code("missing-scores", InputError) as caught:
        stage()(source, settings, context(tmp_path, source, scores=False))
    assert caught.value.setting == setting


@pytest.mark.parametrize(("losses", "task", "expected"), [
    ({"logits": 1.0}, embedders.TASK, [("losses.logits", "unknown-loss")]),
    ({"pairwise_similarity": 1.0}, "translation", [("losses.pairwise_similarity", "unknown-loss")]),
    ({"sentence_embedding": 0, "pairwise_similarity": 0}, embedders.TASK, [("losses", "no-loss")]),
    ({"cosent": 1.0}, embedders.TASK, [("losses.cosent", "missing-scores")]), ({}, embedders.TASK, []),
    ({"labels": 1.0}, "translation", []),
])  # fmt: skip
def test_losses_are_checked_against_task_and_samples(losses, task, expected):
    from smelt.data.splits import Example

    data = {"train": Split("rows", (Example("a", text_pair="b"),))}
    errors = Distill.check_rows(DistillSettings(losses=losses), task, data)
    assert [(error.setting, error.code) for error in errors] == expected
