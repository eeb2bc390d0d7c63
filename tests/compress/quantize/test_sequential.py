"""A large model quantized from file to file: the same codes, one block in memory, whole where it must be."""

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.compress.quantize import sequential
from smelt.compress.quantize.sequential import open_large_model
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize, works_by_block
from smelt.core.errors import InputError
from smelt.core.messages import messages_to_json
from smelt.models import streamed_model, weight_files
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from smelt.models.families.registry import FAMILIES
from smelt.models.model_size import SizeInputs, read_model_size
from smelt.quantization.layers import is_quantized
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny

GPTQ = {"scheme": "int4", "group_size": 16, "method": "gptq", "calibration_samples": 6}
AUTOROUND = GPTQ | {"method": "autoround", "iterations": 3}
RTN = {"scheme": "int4", "group_size": 16}
SMOOTH = {"smoothquant_alpha": 0.5, "sensitivity_samples": 0, "calibration_samples": 6}
AWQ = RTN | {"method": "awq", "clip": "awq", "calibration_samples": 6}


def quantize(family, folder, **settings):
    source = every_family.model_with_layers(family, 2)
    return every_family.run_stage(Quantize(), QuantizeSettings(**settings), source, family, folder)


@pytest.fixture
def large(monkeypatch):
    """Every model is a large one."""
    monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)


# head and embedding are two matrices, or one; an encoder is read before the decoder
@pytest.mark.parametrize(("family", "settings"), [
    ("llama", GPTQ), ("qwen2", RTN), ("gemma", RTN), ("t5", RTN), ("bart", GPTQ), ("llama", AWQ),
    ("opt", AWQ | {"output_layer": False}),  # inputs without a producer get factors
    ("llama", GPTQ | {"method": "awq-gptq"}),  # the blocks are read twice
    ("opt", GPTQ | {"method": "awq-gptq", "output_layer": False, "gptaq_alpha": 0.25}),
    ("bart", GPTQ | {"gptaq_alpha": 0.25}), ("bart", AUTOROUND),
    ("llama", AUTOROUND | {"exclude": ["model.layers.0.*"]}),  # a block without layers to quantize
    ("llama", SMOOTH | {"scheme": "int8-dynamic"}),
    ("gemma", SMOOTH | {"scheme": "int8-static", "calibration_method": "percentile"}),  # a tied head
], ids=str)  # fmt: skip
def test_sequential_quantization_equals_in_memory_quantization(family, settings, tmp_path, monkeypatch):
    in_memory = quantize(family, tmp_path / "whole", **settings)
    monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)
    parts = quantize(family, tmp_path / "parts", **settings)
    assert len(list(parts.out.glob("*.safetensors"))) > 2
    assert read_edits(parts.out) == read_edits(in_memory.out)
    reported, expected = (  # but for the headers of several files, and the name of the rows
        json.dumps([ctx.details | {"bytes_after": 0}, messages_to_json(ctx.warnings)]).replace(
            "parts.", "whole."
        )
        for ctx in (parts, in_memory)
    )
    assert reported == expected
    reference_tensors = load_file(in_memory.out / "model.safetensors")
    stored = {name: t for file in parts.out.glob("*.safetensors") for name, t in load_file(file).items()}
    assert reference_tensors.keys() == stored.keys()
    assert all(
        torch.equal(reference_tensors[name], stored[name])
        and reference_tensors[name].dtype == stored[name].dtype
        for name in reference_tensors
    )
    loaded = load_model(parts.out)[0]
    assert (
        sum(is_quantized(m) for m in loaded.modules())
        == in_memory.details["linear_layers"] + in_memory.details["embeddings"]
    )


def weights_in_memory(shape):
    """How many float parameters of `shape` anybody holds."""
    parameters = [candidate for candidate in gc.get_objects() if type(candidate) is torch.nn.Parameter]
    return sum(p.shape == shape and p.is_floating_point() and not p.is_meta for p in parameters)


@pytest.mark.parametrize(("method", "times"), [("gptq", 1), ("awq-gptq", 2)])
def test_at_most_one_block_is_in_memory(method, times, tmp_path, large, monkeypatch):
    block_counts, tables = [], []
    real = streamed_model.StreamedModel.load_block

    def enter(self, block):
        real(self, block)
        block_counts.append(weights_in_memory(block.module.mlp.up_proj.weight.shape))
        tables.append(weights_in_memory(self.model.lm_head.weight.shape))

    monkeypatch.setattr(streamed_model.StreamedModel, "load_block", enter)
    gc.collect()
    before = weights_in_memory((96, 64))
    quantize("llama", tmp_path / "out", **GPTQ | {"method": method})
    assert [count - before for count in block_counts] == [2, 2] * times  # `gate` is as large as `up`
    assert len(set(tables)) == 1  # the embedding; not the output layer from the first time


@pytest.mark.parametrize(("family", "settings"), [
    ("t5", AWQ),  # the encoder's last norm takes scales of layers in all blocks of the decoder
    ("llama", {"scheme": "int8-static", "sensitivity_samples": 8}),
    ("llama", {"scheme": "int8-dynamic", "exclude": ["auto"]}),
    ("llama", {"scheme": "int4", "group_size": 16, "low_rank_correction": {"rank": 2}}),
    ("llama", {"mixed_precision": {"target_bits": 4.5}}),
    # its pooler is behind the blocks, and no output layer
    ("bert", GPTQ),
    ("gpt2", {"scheme": "int4", "group_size": 16}),  # its layers lie turned around in the file
])  # fmt: skip
def test_methods_comparing_layers_load_full_model(family, settings, tmp_path, large, monkeypatch):
    source = every_family.model_with_layers(family, 2)
    opened = []

    def open_it(*args):
        opened.append(open_large_model(*args))
        raise InterruptedError  # what follows is as ever

    monkeypatch.setattr(sequential, "open_large_model", open_it)
    with pytest.raises(InterruptedError):
        every_family.run_stage(Quantize(), QuantizeSettings(**settings), source, family, tmp_path / "out")
    assert opened == [None]


@pytest.mark.parametrize("family", ["t5", "m2m_100", "llama"])
@pytest.mark.parametrize("targets", ["norms", "layers", "factors"])
def test_planned_smoothing_by_block_equals_run(family, targets, tmp_path, large):
    """The encoder's last norm has readers in all blocks of the decoder; nothing else is shared by blocks."""
    source = every_family.model_with_layers(family, 2)
    settings = QuantizeSettings(
        scheme="int8-static", smoothquant_alpha=0.5, smoothquant_targets=[targets], sensitivity_samples=0
    )
    size = read_model_size(source, json.loads((source / "config.json").read_text()))
    task = FAMILIES[family].tasks[0]
    by_block = works_by_block(settings, SizeInputs(size, size, task, {}))
    ctx = harness.make_context(tmp_path / "out", task)
    opened = open_large_model(tiny.as_artifact(source, task), settings, ctx)
    assert (opened is not None) == by_block == (targets != "norms" or family == "llama")


@pytest.mark.parametrize(("name", "settings"), [("model.layers.1.mlp.up_proj", GPTQ), ("lm_head", RTN)])
def test_non_finite_weights_are_rejected_with_layer_name(name, settings, tmp_path, large):
    source = every_family.model_with_layers("llama", 2)
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors[f"{name}.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with raises_code("non-finite-weights", InputError) as caught:
        every_family.run_stage(Quantize(), QuantizeSettings(**settings), broken, "llama", tmp_path / "out")
    assert f"quantize: {name}: " in str(caught.value)


@pytest.mark.parametrize(
    ("blocks", "settings", "size", "name"),  # of 2e-7 few digits are left, of 1e-9 none
    [
        (False, GPTQ, 2e-7, "model.layers.1.mlp.up_proj"),
        (False, RTN, 1e-9, "lm_head"),
        (True, RTN, 2e-7, "model.layers.1.mlp.up_proj"),
        (True, GPTQ, 1e-9, "lm_head"),
    ],
)
def test_float16_scale_underflow_warns(name, blocks, settings, size, tmp_path, monkeypatch):
    source = shutil.copytree(every_family.model_with_layers("llama", 2), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{name}.weight"] *= size / tensors[f"{name}.weight"].abs().max()
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()  # zero is zero in every type
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    if blocks:
        monkeypatch.setattr(weight_files, "LARGE_BYTES", 0)
    for scheme, count in ((settings, 1), ({"scheme": "int8-dynamic"}, 0)):
        out = tmp_path / f"out-{count}"
        warnings = every_family.run_stage(
            Quantize(), QuantizeSettings(**scheme), source, "llama", out
        ).warnings
        messages = [message.message for message in warnings if message.code == "scale-underflow"]
        assert len(messages) == count, warnings
        assert all(f"{name}: " in text and f" {size:g}," in text for text in messages)
        assert all(f'exclude: ["{name}"]' in text for text in messages)
