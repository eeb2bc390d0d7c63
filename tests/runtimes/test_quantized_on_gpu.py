"""Quantized torch models on a pretended GPU: they run there, on operands of that device alone."""

import numpy as np
import pytest

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.generation.generating_runners import DecoderOnlyRunner
from smelt.quantization.schemes.bitsandbytes import BITSANDBYTES_PACKAGES, import_bitsandbytes
from smelt.quantization.schemes.registry import SCHEMES
from smelt.runtimes.torch_backend import TorchBackend
from tests.support.models import causal, every_family
from tests.support.standins.pretend_gpu import pretend_gpu


def logits(folder, device):
    backend = TorchBackend(folder, DecoderOnlyRunner.graphs, None, 1, device)
    assert backend.device == device
    assert {parameter.device.type for parameter in backend.model.parameters()} == {device}
    ids = np.arange(6).reshape(2, 3)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": ids % 3}
    return backend.step(backend.start(2), feeds)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_logits_on_gpu_equal_cpu_logits(scheme, tmp_path):
    if SCHEMES[scheme].packages == BITSANDBYTES_PACKAGES:
        import_bitsandbytes()
    source = causal.write_model(tmp_path / "model", "llama", num_hidden_layers=1)
    tables = scheme if SCHEMES[scheme].supports_embeddings else None
    settings = QuantizeSettings(scheme=scheme, embedding_scheme=tables)
    every_family.run_stage(Quantize(), settings, source, "llama", tmp_path / "quantized")
    expected = logits(tmp_path / "quantized", "cpu")
    with pretend_gpu() as counts:
        result = logits(tmp_path / "quantized", "cuda")
    assert any(name.startswith("bitsandbytes::") or "mm" in name or "linear" in name for name in counts)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))
