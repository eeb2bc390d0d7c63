"""The empty model that weights are read into: nothing is drawn for it."""

import pytest
import torch

from smelt.models.checkpoint import load_model
from tests.support.models import tiny

pytestmark = pytest.mark.quick


def test_loading_model_draws_no_random_weights(tmp_path, monkeypatch):
    """On the meta device drawing changes nothing; it took half of the time. Elsewhere all is drawn."""
    source, calls = tiny.write_bert(tmp_path / "m"), []
    real = torch.nn.init._no_grad_normal_
    monkeypatch.setattr(torch.nn.init, "_no_grad_normal_", lambda *a, **k: calls.append(a) or real(*a, **k))
    draws = dict(vars(torch.nn.init))
    model = load_model(source)[0]
    assert calls == []
    assert vars(torch.nn.init) == draws
    type(model)(model.config)
    assert len(calls) > 10
