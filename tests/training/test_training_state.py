"""What a model is given while it trains: one dropout for all families, no numbers below a float's range."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from smelt.models.checkpoint import load_model
from smelt.training.training_state import denormals_as_zero, training_state
from tests.support import harness
from tests.support.models import causal, classifiers, seq2seq, tiny

CPU = torch.device("cpu")
# each family with its own rates set apart, so that one which is left as it was is seen
MADE = {
    "marian": lambda f: tiny.write_marian(f, dropout=0.11, attention_dropout=0.12, activation_dropout=0.13),
    "t5": lambda f: seq2seq.write_t5(f, dropout_rate=0.11),
    "bert": lambda f: tiny.write_bert(f, hidden_dropout_prob=0.11, attention_probs_dropout_prob=0.12,
        classifier_dropout=0.13),
    "distilbert": lambda f: classifiers.distilbert(f, dropout=0.11, attention_dropout=0.12,
        seq_classif_dropout=0.13),
    "gpt2": lambda f: causal.write_model(f, "gpt2", resid_pdrop=0.11, embd_pdrop=0.12, attn_pdrop=0.13),
    "llama": lambda f: causal.write_model(f, "llama", attention_dropout=0.11),
}  # fmt: skip


@pytest.fixture(params=MADE)
def model(request, tmp_path):
    return load_model(MADE[request.param](tmp_path / "model"))[0]


@pytest.fixture
def rates(monkeypatch):
    """The probabilities of all dropouts that are computed in training mode, however they are called."""
    rates_seen, real = [], nn.functional.dropout

    def dropout(x, p=0.5, training=True, inplace=False):
        if training:
            rates_seen.append(p)
        return real(x, p, training, inplace)

    monkeypatch.setattr(nn.functional, "dropout", dropout)
    return rates_seen


def dropped(model, rates, value):
    rates.clear()
    with training_state(model, value, CPU):
        model.train()
        harness.logits(model)
    return list(rates)


def test_dropout_setting_applies_to_every_dropout_and_is_restored(model, rates):
    before = dropped(model, rates, None)
    assert {0.11} <= set(before) <= {0.11, 0.12, 0.13}
    assert dropped(model, rates, 0.42) == [0.42] * len(before)
    assert dropped(model, rates, None) == before


def test_training_without_dropout_equals_inference(model):
    with torch.no_grad():
        expected = harness.logits(model.eval())
        with training_state(model, 0.0, CPU):
            torch.testing.assert_close(harness.logits(model.train()), expected, atol=1e-4, rtol=1e-4)
        with training_state(model, None, CPU):
            assert not torch.allclose(harness.logits(model.train()), expected, atol=1e-3)


# 2 threads, because the setting is one of each thread
SUM = """
import numpy
import torch
from smelt.training.training_state import denormals_as_zero
torch.set_num_threads(2)
tiny = torch.from_numpy(numpy.full(1 << 20, 2.0**-130, numpy.float32))  # no product of torch yet
def count():
    return int((tiny * 1.0).view(torch.int32).count_nonzero())
assert tiny.numpy().all()
with denormals_as_zero():
    print(count())
"""


def test_denormals_are_zero_in_all_torch_threads():
    done = subprocess.run([sys.executable, "-c", SUM], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0


def test_denormal_mode_is_restored():
    least = sys.float_info.min
    with denormals_as_zero():
        assert least / 2 == 0
        with denormals_as_zero():
            pass
        assert least / 2 == 0
    assert least / 2 > 0


def test_zero_dropout_disables_layerdrop(tmp_path):
    model, _ = load_model(tiny.write_marian(tmp_path / "m", encoder_layerdrop=0.5, decoder_layerdrop=0.4))
    stacks = model.model.encoder, model.model.decoder
    for value, during in ((0.0, [0.0, 0.0]), (0.1, [0.5, 0.4]), (None, [0.5, 0.4])):
        with training_state(model, value, CPU):
            assert [stack.layerdrop for stack in stacks] == during
        assert [stack.layerdrop for stack in stacks] == [0.5, 0.4]
