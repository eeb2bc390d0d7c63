"""Squared gradients against one backward pass a row, and what they leave behind."""

import pytest
import torch

from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.statistics import squared_gradients
from smelt.core.errors import RunError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.tasks.read_split import read_split
from smelt.training.losses import label_objective
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import embedders, every_family, tiny


@pytest.fixture
def model_and_samples(tmp_path):
    """A classifier, its rows with labels, and a context."""
    source = every_family.model_with_layers("bert", 1)
    task = "text-classification"
    split = read_split(str(tiny.write_labeled(tmp_path / "rows.jsonl")), task, Columns(), tmp_path)
    ctx = harness.make_context(tmp_path / "out", task, split)
    model, _ = load_model(source)
    artifact = tiny.as_artifact(source, task)
    return model, load_calibration_samples(model, artifact, 6, ctx, "test", labels=True), ctx


def test_squared_gradients_are_averaged_over_rows(model_and_samples):
    model, rows, ctx = model_and_samples
    weight = model.bert.encoder.layer[0].output.dense.weight
    expected, count = torch.zeros_like(weight), 0
    for batch in rows.batches:
        for ids, label in zip(batch["input_ids"], batch["labels"], strict=True):
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(ids[None]).logits, label[None])
            loss.backward()
            expected += weight.grad**2
            count += 1
    model.zero_grad()
    gradients = squared_gradients(model, rows, {"fc2": weight}, label_objective(), ctx)
    assert count == rows.num_samples == 6
    torch.testing.assert_close(gradients["fc2"], expected / count, rtol=1e-4, atol=1e-9)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_non_finite_gradient_is_reported(model_and_samples):
    model, rows, ctx = model_and_samples
    with torch.no_grad():
        model.classifier.weight[0, 0] = float("nan")
    with raises_code("non-finite-gradients", RunError) as caught:
        squared_gradients(model, rows, {"pooler": model.bert.pooler.dense.weight}, label_objective(), ctx)
    assert all(fragment in str(caught.value) for fragment in ("pooler", "rows.jsonl"))


def test_pairs_with_contrastive_loss_are_not_split(tmp_path):
    source = embedders.write_embedder(tmp_path / "model")
    task = "sentence-similarity"
    split = read_split(str(embedders.write_rows(tmp_path / "rows.jsonl")), task, Columns(), tmp_path)
    ctx = harness.make_context(tmp_path / "out", task, split)
    model, _ = load_model(source)
    rows = load_calibration_samples(model, tiny.as_artifact(source, task), 8, ctx, "test", labels=True)
    assert [len(batch["labels"]) for batch in rows.batches] == [8]
    weight = model.bert.encoder.layer[0].output.dense.weight
    label_objective()(model, rows.batches[0]).backward()
    expected = weight.grad**2
    model.zero_grad()
    gradients = squared_gradients(model, rows, {"fc2": weight}, label_objective(), ctx)
    assert float(expected.max()) > 0
    torch.testing.assert_close(gradients["fc2"], expected)
