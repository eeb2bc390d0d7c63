"""What torch computes with dequantized weights is what the model with those weights computes."""

import numpy as np
import pytest
import torch

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.export.parity.references import TorchReference, round_weights_, run_exact, run_reference
from smelt.generation.generating_runners import position_ids
from smelt.models.checkpoint import load_model
from smelt.quantization.layers import QuantizedLinear
from smelt.runtimes.registry import open_runner
from tests.support.graphs import graph_exports
from tests.support.models import causal, tiny

SETTINGS = {"int8": {}, "int4": {"scheme": "int4", "symmetric": False}, "binary": {"scheme": "binary"}}


def quantized(folder, source, task, scheme):
    ctx = graph_exports.make_context(folder, task)
    Quantize()(tiny.as_artifact(source, task), QuantizeSettings(**SETTINGS[scheme]), ctx)
    return ctx.out


def plain(folder):
    """Return the model in `folder` with ordinary linear layers of the dequantized weights."""
    from smelt.models.edits import replace_module

    model, _ = load_model(folder)
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, QuantizedLinear):
            new = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            new.weight.data = layer.matrix.dequantize()
            if layer.bias is not None:
                new.bias.data = layer.bias.data
            replace_module(model, name, new)
    return model


@pytest.mark.parametrize("scheme", SETTINGS)
def test_translator_reference_equals_dequantized_model(scheme, tmp_path):
    folder = quantized(tmp_path / "codes", tiny.write_marian(tmp_path / "m"), "translation", scheme)
    model, _ = load_model(folder)
    batch = graph_exports.exported_graphs("marian", "fp32").reference.batch
    tokens = np.random.default_rng(0).integers(1, 50, (8, len(batch.input_ids)))
    exact_reference = run_exact(model, TorchReference(batch, np.zeros(1), tokens, np.zeros(1)))
    with torch.no_grad():
        expected = plain(folder)(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            decoder_input_ids=torch.from_numpy(tokens.T.copy()),
        )  # fmt: skip
    np.testing.assert_allclose(exact_reference.logits, expected.logits.transpose(0, 1), atol=1e-4)
    is_token = batch.attention_mask == 1
    hidden = expected.encoder_last_hidden_state.numpy()
    np.testing.assert_allclose(exact_reference.encoder_states[is_token], hidden[is_token], atol=1e-4)
    keys = expected.past_key_values.cross_attention_cache.layers[1].keys.numpy()
    actual_keys = exact_reference.cross_caches["present.1.encoder.key"]
    np.testing.assert_allclose(
        np.moveaxis(actual_keys, 1, 2)[is_token], np.moveaxis(keys, 1, 2)[is_token], atol=1e-4
    )


def test_layers_and_attention_are_restored(tmp_path):
    folder = quantized(tmp_path / "codes", tiny.write_bert(tmp_path / "m"), "text-classification", "int8")
    model, _ = load_model(folder)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "smelt"
    batch = graph_exports.exported_graphs("bert", "fp32").reference.batch
    run_exact(model, TorchReference(batch, np.zeros(1)))
    assert model.config._attn_implementation == "smelt"
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, QuantizedLinear))


def test_language_model_reference_uses_padding(tmp_path):
    folder = causal.write_model(tmp_path / "m", "gpt2")
    with open_runner(tiny.as_artifact(folder, "language-modeling"), 1, "cpu") as runner:
        batch = graph_exports.exported_graphs("gpt2", "fp32").reference.batch
        reference = run_reference(runner, batch)
        exact_reference = run_exact(runner.backend.model, reference)
        # step by step with a cache, as the runner does it
        np.testing.assert_allclose(exact_reference.logits, reference.logits, atol=1e-4)
        with torch.no_grad():
            ids, mask = batch.input_ids[-1:], batch.attention_mask[-1:]
            expected = runner.backend.model(
                torch.from_numpy(ids), position_ids=torch.from_numpy(position_ids(mask))
            ).logits
    np.testing.assert_allclose(exact_reference.all_logits, expected[0], atol=1e-4)


def test_weights_are_rounded_to_half_in_place():
    layer = torch.nn.Linear(3, 2)
    initial_weights = layer.weight.detach().clone()
    round_weights_(layer)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, initial_weights.half().float())
    assert not torch.equal(layer.weight, initial_weights)


def test_position_tables_are_rounded_like_the_graph(tmp_path):
    model, _ = load_model(causal.write_model(tmp_path / "llama", "llama"))
    rotary, hidden, positions = model.base_model.rotary_emb, torch.zeros(1, 8, 64), torch.arange(8)[None]
    exact_tables = [table.clone() for table in rotary(hidden, positions)]
    round_weights_(model)
    for table, exact_table in zip(rotary(hidden, positions), exact_tables, strict=True):
        assert torch.equal(table, exact_table.half().float())
        assert not torch.equal(table, exact_table)
