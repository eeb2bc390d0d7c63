"""The empty model that weights are read into: nothing is drawn for it."""

import pytest
import torch

from smelt.models.checkpoint import load_model
from tests.support.models import tiny

pytestmark = pytest.mark.quick


def test_a_model_that_is_read_draws_no_weights(tmp_path, monkeypatch):
    """On the meta device drawing changes nothing; it took half of the time. Elsewhere all is drawn."""
    source, drawn = tiny.write_bert(tmp_path / "m"), []
    real = torch.nn.init._no_grad_normal_
    monkeypatch.setattr(torch.nn.init, "_no_grad_normal_", lambda *a, **k: drawn.append(a) or real(*a, **k))
    draws = dict(vars(torch.nn.init))
    model = load_model(source)[0]
    assert drawn == []
    assert vars(torch.nn.init) == draws
    type(model)(model.config)
    assert len(drawn) > 10
