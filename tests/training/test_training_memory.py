"""A training that cannot fit is refused; one whose weights are no numbers is never kept."""

import math
import re
from functools import partial

import pytest
import torch

from smelt.compress.finetune import FinetuneSettings
from smelt.core.errors import RunError
from smelt.models.checkpoint import load_model
from smelt.tasks.samples import EncodedSample
from smelt.training import trainer as training_loop
from smelt.training import training_state
from smelt.training.losses import label_objective
from smelt.training.processes import LaunchSettings
from smelt.training.trainer import run_training
from smelt.training.training_state import require_training_memory
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

pytestmark = pytest.mark.quick

ROWS = [EncodedSample([2, 5, 3], None, 1), EncodedSample([2, 6, 3], None, 0)]


@pytest.fixture
def model(tmp_path):
    return load_model(tiny.write_bert(tmp_path / "m"))[0]


def _train(model, tmp_path, objective, **settings):
    ctx = harness.make_context(tmp_path / "work" / "out", "text-classification")
    chosen = FinetuneSettings(batch_size=2, precision="fp32", **settings)
    run_training(model, ROWS, ROWS, objective=objective, settings=chosen, ctx=ctx)


def test_required_memory_equals_optimizer_states_and_copies(model, monkeypatch):
    """4 bytes of gradient and 8 of moments a weight, 4 for each copy (Loshchilov & Hutter 2019)."""
    weights = sum(p.numel() for p in model.parameters())
    requested_bytes = []
    monkeypatch.setattr(
        training_state, "require_memory", lambda need, what, remedy, free_bytes: requested_bytes.append(need)
    )
    cpu = torch.device("cpu")
    need = partial(require_training_memory, model, cpu, optimizer="adamw_torch")
    need(keeps_best=False, keeps_average=False)
    need(keeps_best=True, keeps_average=True)
    need(keeps_best=False, keeps_average=False, optimizer="adamw_bnb_8bit")  # two moments of a byte each
    zero = LaunchSettings(num_processes=2, strategy="deepspeed")  # and its float32 copy of a part
    need(keeps_best=False, keeps_average=False, parts=2, launch=zero)
    model.classifier.weight.requires_grad_(False)
    need(keeps_best=True, keeps_average=False)
    rest = weights - model.classifier.weight.numel()
    assert requested_bytes == [12 * weights, 20 * weights, 6 * weights, 8 * weights, 16 * rest]


def test_training_exceeding_memory_is_rejected_before_first_step(model, tmp_path, monkeypatch):
    monkeypatch.setattr(training_state, "available_bytes", lambda: 1000)
    with raises_code("out-of-memory", RunError):
        _train(model, tmp_path, lambda m, b: pytest.fail("it trained"), max_steps=1)


def test_non_finite_loss_names_step_and_last_good_checkpoint(model, tmp_path):
    plain, calls = label_objective(), []

    def objective(m, batch):
        calls.append(m.training)
        loss = plain(m, batch)
        return loss * math.nan if sum(calls) == 4 else loss

    with raises_code("non-finite-loss", RunError) as caught:
        _train(model, tmp_path, objective, max_steps=8, num_evals=4)
    assert re.findall(r"\d+", str(caught.value))[:3] == ["4", "8", "2"]


def test_update_with_non_finite_weights_is_rejected(model, tmp_path, monkeypatch):
    """The loss of the last step is finite; what its gradient does to the weights is not seen any more."""

    def objective(m, batch):
        loss = label_objective()(m, batch)
        if m.training:
            m.classifier.weight.register_hook(lambda gradient: gradient * math.nan)
        return loss

    with raises_code("non-finite-weights", RunError):
        _train(model, tmp_path, objective, max_steps=1, num_evals=0)


def test_memory_check_includes_kept_copies(model, tmp_path, monkeypatch):
    requests = []
    monkeypatch.setattr(
        training_loop, "require_training_memory", lambda model, device, **options: requests.append(options)
    )
    _train(model, tmp_path, label_objective(), max_steps=1, num_evals=1, ema_decay=0.9)
    kept_copies = {"keeps_best": True, "keeps_average": True}
    assert requests == [{"optimizer": "adamw_torch_fused", **kept_copies, "parts": 1, "launch": None}]
