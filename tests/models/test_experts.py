"""Experts as separate layers compute what transformers' stacked weights do, and are read from its files."""

import pytest
import torch
import transformers

from smelt.models.checkpoint import load_model
from smelt.models.experts import separate_experts
from tests.support.models import every_family

FAMILY = "mixtral"


@pytest.fixture
def stacked_model():
    """A random model as transformers makes it."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        **every_family.CONFIGS[FAMILY], vocab_size=90, bos_token_id=1, eos_token_id=2
    )
    model = transformers.MixtralForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # so that routers prefer experts
    return model


def logits(model, **options):
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # left padding
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, **options).logits[mask.bool()]


def test_saved_model_of_transformers_is_read_with_equal_logits(stacked_model, tmp_path):
    stacked_model.save_pretrained(tmp_path)
    model, edits = load_model(tmp_path)
    assert edits == []
    linear = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear and ".experts." in name]
    assert len(linear) == 2 * 4 * 3
    assert torch.allclose(logits(model), logits(stacked_model), atol=1e-5)


def test_separated_experts_have_equal_logits_and_gradients(stacked_model):
    model = transformers.MixtralForCausalLM(stacked_model.config).eval()
    model.load_state_dict(stacked_model.state_dict())
    separate_experts(model)
    for each in (model, stacked_model):
        ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
        each(ids, labels=ids).loss.backward()
    assert torch.allclose(logits(model), logits(stacked_model), atol=1e-5)
    stacked = stacked_model.model.layers[0].mlp.experts
    for index, expert in enumerate(model.model.layers[0].mlp.experts):
        gate, up = stacked.gate_up_proj.grad[index].chunk(2)
        down = stacked.down_proj.grad[index]
        for layer, expected in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            assert torch.allclose(expert.get_submodule(layer).weight.grad, expected, atol=1e-5)
