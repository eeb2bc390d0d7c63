"""What the mask of the hidden width computes: CoFi's expected size, its norms, which channels close."""

import math

import pytest
import torch
from torch.nn import functional

from smelt.compress.prune.importances.scores import hidden_norms
from smelt.models.families.registry import blocks_of, hidden_state_locations
from tests.support.models import learned_mask_models


def cdf_qz(x, loga):
    """The reference code (CoFiPruning, models/l0_module.py), as it stands there."""
    xn = (x - -0.1) / (1.1 - -0.1)
    logits = math.log(xn) - math.log(1 - xn)
    return torch.sigmoid(logits * (2.0 / 3.0) - loga).clamp(min=1e-6, max=1 - 1e-6)


def test_expected_size_equals_cofi_reference():
    """get_num_parameters_and_constraint_for_hidden of l0_module.py, on products without biases."""
    masks, model, _ = learned_mask_models.masks_of_family("modernbert", parts=("attention", "ffn"))
    config = model.config
    by_kind = {"attention": [], "ffn": []}
    for number, masked in enumerate(masks.masked):
        alphas = masks.units[str(number)], masks.parts[str(number)]
        by_kind[masked.positions[0].kind].append(alphas)
    (head_loga, headlayer_loga), (int_loga, intlayer_loga) = (
        (torch.stack([u for u, _ in log_alphas]), torch.cat([p for _, p in log_alphas]))
        for log_alphas in by_kind.values()
    )
    hidden_size = config.hidden_size
    params_per_head = hidden_size * hidden_size * 4 // config.num_attention_heads
    prunable_model_size = 2 * (hidden_size**2 * 4 + 3 * hidden_size * config.intermediate_size)

    num_parameters = 0
    hidden_score = 1 - cdf_qz(0, masks.hidden.log_alpha)
    all_head_score = (1 - cdf_qz(0, headlayer_loga)).view(-1, 1)
    head_score = (all_head_score * (1 - cdf_qz(0, head_loga))).reshape(-1)
    num_parameters += torch.sum(torch.outer(hidden_score, head_score)) * params_per_head / hidden_size
    intlayer_score = (1 - cdf_qz(0, intlayer_loga)).unsqueeze(-1)
    int_score = (intlayer_score * (1 - cdf_qz(0, int_loga))).reshape(-1)
    num_parameters += (
        torch.sum(torch.outer(hidden_score, int_score)) * 3
    )  # of the gate too, which BERT has not

    expected = float(num_parameters.detach() / prunable_model_size)
    assert 0.1 < expected < 0.6
    assert float(masks.expected_keep_ratio().detach()) == pytest.approx(expected, abs=1e-5)
    masks.expected_keep_ratio().backward()
    assert float(masks.hidden.log_alpha.grad.abs().min()) > 0


def test_expected_size_equals_manual_count():
    """BERT of 2 layers, width 32, 4 heads of 8, 64 neurons: 8 of 32 channels, 1 head and 16 neurons stay."""
    masks, _, _ = learned_mask_models.masks_of_family("bert")
    head, neuron = 8 * 3 * (32 + 1) + 8 * 32, 32 + 1 + 32
    assert masks.whole == 2 * (4 * head + 64 * neuron)
    learned_mask_models.open_channels(masks, range(0, 32, 4))
    with torch.no_grad():
        for number, masked in enumerate(masks.masked):
            masks.units[str(number)].fill_(-50.0)
            masks.units[str(number)][: 1 if masked.count == 4 else 16] = 50.0
    expected = 8 / 32 * (head + 16 * neuron) / (4 * head + 64 * neuron)
    assert float(masks.expected_keep_ratio().detach()) == pytest.approx(expected, abs=1e-6)
    assert masks.final_keep_ratio() == pytest.approx(expected)


@pytest.mark.parametrize("what", [["width"], ["ffn", "width"]])
def test_layers_without_unit_masks_are_narrowed_by_width(what):
    masks, model, _ = learned_mask_models.masks_of_family("bert", targets=what)
    products = [name for block in blocks_of(model) for part in block.parts for name in part.linear_layers]
    matrices = sum(model.get_submodule(name).weight.numel() for name in products)
    biases = sum(model.get_submodule(name).bias.numel() for name in products)
    added = 2 * 2 * 32  # biases of what parts add are no unit's
    assert masks.whole == matrices + biases - added
    learned_mask_models.open_channels(masks, range(8))
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(50.0)
    assert float(masks.expected_keep_ratio().detach()) == pytest.approx(8 / 32)
    assert masks.final_keep_ratio() == pytest.approx(8 / 32)


class CoFiLayerNorm(torch.nn.LayerNorm):
    """The reference code (CoFiPruning, models/modeling_bert.py), as it stands there."""

    def forward(self, input, hidden_z=None):
        remaining_index = torch.where(~hidden_z.eq(0))[0]
        compressed_input = torch.index_select(input, dim=-1, index=remaining_index)
        compressed_weight = self.weight[remaining_index]
        compressed_bias = self.bias[remaining_index]
        normalized_shape = len(remaining_index)
        normed_input = functional.layer_norm(
            compressed_input, [normalized_shape], compressed_weight, compressed_bias, self.eps
        )
        output = input.clone()
        output[:, :, remaining_index] = normed_input
        return output


def rms_norm(module, hidden_states, hidden_z):
    """The reference code (LLM-Shearing, models/composer_llama.py), as it stands there."""
    remaining_index = torch.where(~hidden_z.eq(0))[0]
    compressed_input = torch.index_select(hidden_states, dim=-1, index=remaining_index)
    variance = compressed_input.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + module.variance_epsilon)
    output = module.weight * hidden_states
    return output.mul(hidden_z)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_masked_norms_equal_reference(family):
    masks, model, _ = learned_mask_models.masks_of_family(family)
    norm = hidden_norms(model)[1]
    setattr(norm, "eps" if family == "bert" else "variance_epsilon", 0.1)  # so that it tells
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        masks.hidden.log_alpha.fill_(0.0)  # a third of a draw is 0
    model.train()
    with masks._masked_training():
        model(torch.randint(5, 20, (2, 9)))
        hidden_z = masks.hidden._mask.detach()
        assert 0 < int(hidden_z.eq(0).sum()) < len(hidden_z)
        x = torch.randn(2, 9, len(hidden_z)) * hidden_z
        outputs = norm(x).detach()
    if family == "bert":
        reference = CoFiLayerNorm(len(hidden_z), norm.eps)
        reference.load_state_dict(norm.state_dict())
        expected = reference(x, hidden_z).mul(hidden_z).detach()
    else:
        expected = rms_norm(norm, x, hidden_z).detach()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["opt", "marian", "deberta-v2"])
def test_training_masks_close_same_channels_in_all_states(family):
    masks, model, _ = learned_mask_models.masks_of_family(family)
    with torch.no_grad():
        masks.hidden.log_alpha.fill_(0.0)
    states = []
    handles = [
        model.get_submodule(state.module_path).register_forward_hook(
            lambda m, args, result, state=state: states.append(state.extract(args, result).detach())
        )
        for state in hidden_state_locations(model)
        if state.index
    ]
    model.train()
    ids = torch.randint(5, 20, (2, 9))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    closed = []
    with masks._masked_training():
        for _ in range(2):
            states.clear()
            model(ids, **more).logits.square().sum().backward()
            closed_channels = [(state == 0).all(dim=0).all(dim=0) for state in states]
            assert len(closed_channels) == len(handles) > 1
            assert all(torch.equal(closed_channels[0], other) for other in closed_channels)
            closed.append(closed_channels[0])
    for handle in handles:
        handle.remove()
    assert not torch.equal(*closed)
    assert 0 < int(closed[0].sum()) < masks.hidden.width
    assert float(masks.hidden.log_alpha.grad.abs().max()) > 0


def test_kept_channels_match_expectation_in_multiples_of_eight():
    masks, _, _ = learned_mask_models.masks_of_family("bert")
    learned_mask_models.open_channels(masks, range(3, 16))  # 13, of which the nearest multiple is 16
    with torch.no_grad():
        masks.hidden.log_alpha[20:23] = -49.0
    assert masks.hidden.kept_channels().tolist() == [*range(3, 16), 20, 21, 22]
    assert masks.hidden.final_mask().tolist() == [float(3 <= index < 16) for index in range(32)]
    learned_mask_models.open_channels(masks, [])
    assert len(masks.hidden.kept_channels()) == 8
    learned_mask_models.open_channels(masks, range(32))
    assert masks.hidden.kept_channels().tolist() == list(range(32))
