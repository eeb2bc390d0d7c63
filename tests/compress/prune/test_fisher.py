"""Squared slopes of the loss in the scale of each unit, row by row."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from smelt.compress.prune.importances.fisher import fisher_scores
from smelt.compress.prune.units import find_groups, linear_with_inputs
from tests.support.models.pruning_models import bert_model, example_batch, marian_model


def _rows(batch):
    return [
        {name: value[index : index + 1] for name, value in batch.items()}
        for index in range(len(batch["input_ids"]))
    ]


def _loss(model, batch):
    """Return a cross-entropy whose labels follow from the row alone."""
    logits = model(**batch).logits
    labels = batch["decoder_input_ids"] if "decoder_input_ids" in batch else batch["input_ids"][:, 0]
    return cross_entropy(logits.flatten(0, -2), labels.flatten() % logits.shape[-1])


@pytest.mark.parametrize("build", [bert_model, marian_model])
def test_fisher_score_is_mean_squared_gradient_of_unit_scale(build):
    model = build().double()
    attentions, blocks = find_groups(model)
    rows = _rows(example_batch(model))
    assert len(rows) > 1
    scores = fisher_scores(model, attentions, blocks, rows, _loss)
    units = [(attentions[1], attentions[1].structure.out, 1, attentions[1].head_dim(model), scores.heads)]
    units += [(blocks[0], blocks[0].structure.down, 3, 1, scores.neurons)]
    for group, product, unit, width, group_scores in units:
        weight, step = linear_with_inputs(model, product).weight, 1e-4
        original, total = weight.detach().clone(), 0.0
        for row in rows:  # scaling what a unit gives is scaling its columns of the product behind it
            values = []
            for scale in (1 + step, 1 - step):
                with torch.no_grad():
                    weight.copy_(original)
                    weight[:, unit * width : (unit + 1) * width] *= scale
                    values.append(float(_loss(model, row)))
            total += ((values[0] - values[1]) / (2 * step)) ** 2 / len(rows)
        with torch.no_grad():
            weight.copy_(original)
        assert float(group_scores[group.name][unit]) == pytest.approx(total, rel=1e-3)
    assert all(p.grad is None for p in model.parameters())
