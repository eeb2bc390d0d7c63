"""A model taken block by block: what is written is what a whole model would have been, in shards."""

import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.core import system
from smelt.core.errors import RunError
from smelt.core.messages import message_codes
from smelt.generation.generating_runners import token_nll
from smelt.models import streamed_model, weight_files
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import read_edits
from smelt.models.families.registry import blocks_of
from smelt.models.streamed_model import open_streamed
from smelt.runtimes import torch_backend
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of three blocks, stored in bfloat16."""
    source = every_family.model_with_layers("llama", 3)
    model, edits = load_model(source)
    out = tmp_path_factory.mktemp("llama")
    save_model(model, edits, out, source, "bf16")
    return out


def test_one_block_is_in_memory_and_all_are_saved(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)
    streamed = open_streamed(llama, tmp_path)
    assert streamed is not None

    def there():
        return [not any(p.is_meta for p in b.module.parameters()) for b in blocks_of(streamed.model)]

    assert there() == [False] * 3
    assert (
        streamed.model.lm_head.weight.is_meta
        or streamed.model.lm_head.weight is streamed.model.model.embed_tokens.weight
    )
    for number, block in enumerate(blocks_of(streamed.model)):
        streamed.load_block(block)
        assert there() == [index == number for index in range(3)]
        streamed.save_block(block)
    assert streamed.finish(streamed.edits) == []
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    stored = {n: t for name in names for n, t in load_file(tmp_path / name).items()}
    before = load_file(llama / "model.safetensors")
    assert stored.keys() == before.keys()
    assert all(torch.equal(stored[n], before[n]) and stored[n].dtype == torch.bfloat16 for n in before)
    assert torch.equal(harness.logits(load_model(tmp_path)[0]), harness.logits(load_model(llama)[0]))


def test_bfloat16_weights_are_memory_mapped_if_float32_does_not_fit(llama, monkeypatch):
    """The float32 model does not fit: 16-bit matrices are widened at each use, which is exact."""
    ids = np.arange(5, 14, dtype=np.int64)[None]
    with open_folder(llama, "torch", threads=1, device="cpu") as runner:
        expected = token_nll(runner, ids)
    needed = 4 * sum(p.numel() for p in load_model(llama)[0].parameters())
    monkeypatch.setattr(torch_backend, "available_bytes", lambda: needed - 1)
    with open_folder(llama, "torch", threads=1, device="cpu") as runner:
        kinds = {
            n.rpartition(".")[2]: p.dtype for n, p in runner.backend.model.named_parameters() if p.dim() > 1
        }
        assert set(kinds.values()) == {torch.bfloat16}
        assert np.array_equal(token_nll(runner, ids), expected)
    monkeypatch.setattr(system, "available_bytes", lambda: needed - 1)
    with raises_code("out-of-memory", RunError):
        load_model(llama)


def _resident_bytes():
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.skipif(
    not Path("/proc/self/status").exists() or platform.libc_ver()[0] != "glibc",
    reason="only glibc is asked to give memory back",
)
def test_freed_memory_is_returned_to_system():
    """What one block leaves in holes is not in memory with the next one."""
    pieces = [torch.ones(20_000 if number % 2 else 200) for number in range(4000)]
    resident = _resident_bytes()
    del pieces[1::2]  # 160 MB, each between two that stay
    streamed_model.trim_memory()
    assert resident - _resident_bytes() > 100e6
    assert len(pieces) == 2000


@pytest.mark.parametrize(("stage", "settings"), [
    (Sparsify(), SparsifySettings(method="wanda")),
    (Factorize(), FactorizeSettings(method="svd", energy=0.7, optimize_for="size", dtype="fp32")),
    (Factorize(),
     FactorizeSettings(method="asvd", keep_ratio=0.5, optimize_for="size", calibration_samples=6)),
    (Prune(), PruneSettings(importance="magnitude")),
    (DropLayers(), DropLayersSettings(keep_ratio=0.67, importance="block-influence", dtype="fp32")),
    (DropLayers(), DropLayersSettings(targets=["attention", "ffn"], layers=4, importance="block-influence")),
    (Quantize(), QuantizeSettings(scheme="int2", group_size=32, method="hqq", embedding_scheme="int4")),
    (Quantize(), QuantizeSettings(scheme="int8-dynamic", exclude=["*.down_proj"], output_layer=False)),
    (Quantize(),
     QuantizeSettings(scheme="pow2", group_size=16, embeddings=False, method="gptq", calibration_samples=6)),
])  # fmt: skip
def test_stage_output_equals_in_memory_model(stage, settings, llama, tmp_path, monkeypatch):
    stage = (stage, settings, llama, "llama")
    in_memory = every_family.run_stage(*stage, tmp_path / "whole")
    monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)
    streamed = every_family.run_stage(*stage, tmp_path / "parts")
    assert (streamed.out / "model.safetensors.index.json").is_file()
    for ctx in (in_memory, streamed):
        ctx.details.pop("calibration", None)  # which names the file of rows
        ctx.details.pop("bytes_after", None)  # of which each shard has a head of its own
    assert streamed.details == in_memory.details
    assert message_codes(streamed.warnings) == message_codes(in_memory.warnings)  # whose texts name the file
    assert read_edits(streamed.out) == read_edits(in_memory.out)
    assert (streamed.out / "config.json").read_text() == (in_memory.out / "config.json").read_text()
    expected, stored = load_model(in_memory.out)[0].state_dict(), load_model(streamed.out)[0].state_dict()
    assert all(torch.equal(expected[name], stored[name]) for name in expected)


@pytest.mark.parametrize(("family", "stage", "settings"), [
    ("t5", Prune(), PruneSettings(importance="magnitude")),
    ("gemma", Prune(), PruneSettings(importance="magnitude")),
    ("t5", DropLayers(), DropLayersSettings(keep_ratio=0.5, importance="last")),
])  # fmt: skip
def test_tied_embeddings_and_shared_biases_equal_in_memory_model(
    family, stage, settings, tmp_path, monkeypatch
):
    stage = (stage, settings, every_family.model_with_layers(family, 2), family)
    in_memory = every_family.run_stage(*stage, tmp_path / "whole")
    monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)
    streamed = every_family.run_stage(*stage, tmp_path / "parts")
    for ctx in (in_memory, streamed):
        ctx.details.pop("calibration", None)  # which names the file of rows
    assert streamed.details == in_memory.details
    expected, stored = load_model(in_memory.out)[0].state_dict(), load_model(streamed.out)[0].state_dict()
    assert all(torch.equal(expected[name], stored[name]) for name in expected)


def test_small_or_shared_models_are_not_streamed(llama, tmp_path, monkeypatch):
    assert open_streamed(llama, tmp_path) is None  # it is small
    monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)
    assert open_streamed(every_family.model_with_layers("gpt2", 1), tmp_path) is None  # turned around
    shared = every_family.run_stage(
        ShareWeights(),
        ShareWeightsSettings(),
        every_family.model_with_layers("bert", 2),
        "bert",
        tmp_path / "s",
    )
    assert open_streamed(shared.out, tmp_path) is None
