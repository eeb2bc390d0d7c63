"""Going block by block: what each block is fed is, to the bit, what it is fed in the whole model."""

from dataclasses import replace

import pytest
import torch

from smelt.calibration.run_blocks import run_blocks
from smelt.calibration.samples import CalibrationSamples
from smelt.compress.share_weights import ShareWeightsSettings, share_layers
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family
from tests.support.models.every_family import DISTINCT_FAMILIES


def rows_for(model, lengths=((2, 9), (3, 7))):
    """Batches of random ids, with decoder inputs where there is a decoder."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for rows, length in lengths:
        ids = torch.randint(5, 20, (rows, length), generator=draw)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.randint(5, 20, (rows, length - 2), generator=draw)
        batches.append(batch)
    return CalibrationSamples("made", batches, 5, 39)


def fed(model, rows, names):
    """What the modules `names` are fed in whole runs, float [..., K], by name and batch."""
    inputs_by_layer = {name: [] for name in names}
    modules = [model.get_submodule(name) for name in names]
    hooks = [
        module.register_forward_pre_hook(
            lambda m, inputs, n=name: inputs_by_layer[n].append(inputs[0].clone())
        )
        for name, module in zip(names, modules, strict=True)
    ]
    with torch.no_grad():
        for batch in rows.batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    return inputs_by_layer


def outs_of(model):
    """The last product of every part, by name: what it is fed depends on all that stands before it."""
    return [part.linear_layers[-1] for block in blocks_of(model) for part in block.parts]


def seen(model, rows, tmp_path, change=lambda step: None, inputs=None, **settings):
    """What the last products of each block are fed when it comes, [tokens, K] by name and batch."""
    inputs = {} if inputs is None else inputs
    for step in run_blocks(model, rows, harness.make_context(tmp_path / "out"), **settings):
        parts = step.block.parts
        names = [part.linear_layers[-1] for part in parts]
        layers = {name: [model.get_submodule(name)] for name in names}
        step.observe(layers, lambda name, x: inputs.setdefault(name, []).append(x.clone()))
        change(step)
    return inputs


def test_block_inputs_of_held_back_samples_are_observed_separately(tmp_path):
    model, _ = load_model(every_family.model_with_layers("bart", 2))
    samples, held_back = rows_for(model), rows_for(model, ((2, 5), (1, 8), (4, 6)))
    both = replace(samples, held_back=held_back)
    expected = [fed(model, part, outs_of(model)) for part in (samples, held_back)]
    actual = [{}, {}]
    for step in run_blocks(model, both, harness.make_context(tmp_path / "out")):
        parts = step.block.parts
        layers = {part.linear_layers[-1]: [model.get_submodule(part.linear_layers[-1])] for part in parts}
        for inputs, is_held_back in zip(actual, (False, True), strict=True):
            step.observe(layers, lambda n, x, i=inputs: i.setdefault(n, []).append(x), held_back=is_held_back)
        with step.collect(layers) as statistics:
            assert all(
                (each.tokens, each.judged.tokens) == tuple(sum(map(len, i[name])) for i in actual)
                for name, each in statistics.items()
            )
    for expected_inputs, inputs in zip(expected, actual, strict=True):
        assert inputs.keys() == expected_inputs.keys()
        for name, values in inputs.items():
            for reference, value in zip(expected_inputs[name], values, strict=True):
                torch.testing.assert_close(reference.flatten(0, -2), value)


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_block_inputs_equal_full_model_inputs(family, tmp_path):
    model, _ = load_model(every_family.model_with_layers(family, 3))
    rows = rows_for(model)
    expected = fed(model, rows, outs_of(model))
    inputs = seen(model, rows, tmp_path)
    assert list(inputs) == list(expected)
    for name, values in expected.items():
        for reference, actual in zip(values, inputs[name], strict=True):
            assert torch.equal(reference.flatten(0, -2), actual), name
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_later_blocks_receive_outputs_of_changed_blocks(family, tmp_path):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    rows = rows_for(model)

    def compare_and_halve(step):
        names = [part.linear_layers[-1] for part in step.block.parts]
        for name, values in fed(model, rows, names).items():  # of the model as it is at the moment
            assert all(torch.equal(a.flatten(0, -2), b) for a, b in zip(values, inputs[name], strict=True))
        with torch.no_grad():
            for parameter in step.module.parameters():
                parameter.mul_(0.5)

    inputs = {}
    before = fed(model, rows, outs_of(model))
    seen(model, rows, tmp_path, compare_and_halve, inputs)
    last = outs_of(model)[-1]
    assert not torch.equal(before[last][0].flatten(0, -2), inputs[last][0])


def test_offloaded_states_equal_states_in_memory(tmp_path):
    model, _ = load_model(every_family.model_with_layers("t5", 2))  # whose blocks hand a bias on besides
    rows = rows_for(model)
    in_memory, stored = seen(model, rows, tmp_path), seen(model, rows, tmp_path, limit_bytes=0)
    assert all(torch.equal(a, b) for n in in_memory for a, b in zip(in_memory[n], stored[n], strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_layer_shared_by_blocks_is_observed_in_all_of_them(tmp_path):
    model, edits = load_model(every_family.model_with_layers("bert", 3))
    share_layers(model, edits, ShareWeightsSettings(layers_per_group=3))
    rows = rows_for(model, ((2, 9),))
    names = [block.feed_forwards[0].down for block in blocks_of(model)]
    expected = fed(model, rows, [names[0]])[names[0]]
    inputs = []
    for step in run_blocks(model, rows, harness.make_context(tmp_path / "out")):
        if step.block.index == 0:
            step.observe({"down": [model.get_submodule(names[0])]}, lambda _, x: inputs.append(x.clone()))
    assert len(inputs) == len(expected) == 3
    assert all(torch.equal(a.flatten(0, -2), b) for a, b in zip(expected, inputs, strict=True))


def test_block_used_in_several_places_is_yielded_once_and_run_in_all(tmp_path):
    model, _ = load_model(every_family.model_with_layers("marian", 3))
    layers = model.model.encoder.layers
    layers[2] = layers[0]
    rows = rows_for(model)
    expected = fed(model, rows, ["model.decoder.layers.0.encoder_attn.k_proj"])
    inputs = []
    places = []
    for step in run_blocks(model, rows, harness.make_context(tmp_path / "out")):
        places.append(step.block.module_path)
        if step.block.module_path == "model.decoder.layers.0":
            crossed = {"k": [step.module.encoder_attn.k_proj]}
            step.observe(crossed, lambda _, x: inputs.append(x.clone()))
    assert places == [
        "model.encoder.layers.0", "model.encoder.layers.1",
        *(f"model.decoder.layers.{n}" for n in range(3)),
    ]  # fmt: skip
    for reference, actual in zip(expected["model.decoder.layers.0.encoder_attn.k_proj"], inputs, strict=True):
        assert torch.equal(reference.flatten(0, -2), actual)


def test_padding_is_not_observed(tmp_path):
    model, _ = load_model(every_family.model_with_layers("marian", 1))
    ids = torch.randint(5, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = {
        "input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5],
        "labels": torch.tensor([[5, 5, 5, 5, 5], [5, 5, 5, -100, -100]]),
    }  # fmt: skip
    counts = {}
    for step in run_blocks(
        model, CalibrationSamples("made", [batch], 2, 12), harness.make_context(tmp_path / "out")
    ):
        layers = {n: [m] for n, m in step.module.named_modules() if n.endswith(("_proj", "fc1"))}
        step.observe(layers, lambda n, x, s=step: counts.update({(s.block.stack.name, n): len(x)}))
    assert counts["encoder_layers", "fc1"] == 10
    assert counts["decoder_layers", "fc1"] == counts["decoder_layers", "encoder_attn.q_proj"] == 8
    assert counts["decoder_layers", "encoder_attn.k_proj"] == 10


def test_unknown_model_family_is_refused(tmp_path):
    model, _ = load_model(every_family.model_with_layers("bert", 1))
    model.config.model_type = "perceiver"
    with raises_code("unsupported-family", InputError) as caught:
        next(run_blocks(model, rows_for(model), harness.make_context(tmp_path / "out"), stage="sparsify"))
    assert "perceiver" in str(caught.value)
