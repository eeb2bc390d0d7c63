"""A model that goes on from a block gives, to the bit, what it gives when it is run from its beginning."""

from contextlib import contextmanager

import pytest
import torch

from smelt.calibration import prefix_cache
from smelt.calibration.prefix_cache import PrefixCachedModel
from smelt.calibration.samples import CalibrationSamples, model_outputs
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from tests.support.models import every_family
from tests.support.models.every_family import DISTINCT_FAMILIES


def rows_for(model):
    """Two batches of random ids, with decoder inputs where there is a decoder."""
    batches = []
    for rows, length in ((2, 9), (3, 7)):
        ids = torch.arange(rows * length).reshape(rows, length) % 15 + 5
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids[:, 2:] + 1
        batches.append(batch)
    return CalibrationSamples("made", batches, 5, 39)


def tiny_model(family):
    return load_model(every_family.model_with_layers(family, 3))[0]


def whole(model, rows):
    return [out.clone() for out in model_outputs(model, rows.batches)]


def scaled(model, block, by):
    weight = model.get_submodule(block.parts[-1].linear_layers[-1]).weight
    with torch.no_grad():  # a half: a norm of the outputs (Gemma 3) would undo a factor of all
        weight[: len(weight) // 2].mul_(by)


def equal(actual, wanted):
    return len(actual) == len(wanted) and all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_cached_outputs_equal_full_forward_wherever_a_layer_changes(family, tmp_path):
    model = tiny_model(family)
    rows, blocks = rows_for(model), blocks_of(model)
    retried, plain = PrefixCachedModel(model, rows.batches, tmp_path), whole(model, rows)
    assert equal(list(retried.outputs()), plain)
    for block in (*blocks, blocks[:2][-1]):  # at last one that was passed; ALBERT has one block
        retried.start_at(block.stack.name, block.index)
        for by in (2.0, 3.0):
            scaled(model, block, by)
            outputs = list(retried.outputs())
            assert equal(outputs, whole(model, rows))
            assert not equal(outputs, plain)
            scaled(model, block, 1 / by)
        model.load_state_dict(load_model(every_family.model_with_layers(family, 3))[0].state_dict())
        assert equal(list(retried.outputs()), plain)


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_changes_run_together_give_outputs_of_full_forward(family, tmp_path, monkeypatch):
    """Later blocks compute several changes at once."""
    monkeypatch.setattr(prefix_cache, "_STACKED_TOKENS", 60)
    model = tiny_model(family)
    rows = rows_for(model)
    retried, ran = PrefixCachedModel(model, rows.batches, tmp_path), []
    blocks = blocks_of(model)
    model.get_submodule(blocks[-1].parts[-1].linear_layers[-1]).register_forward_pre_hook(
        lambda _, inputs: ran.append(len(inputs[0].flatten(0, -2)))
    )

    def change(block, by):
        @contextmanager
        def apply():
            scaled(model, block, by)
            yield
            scaled(model, block, 1 / by)

        return apply

    def summarize(number, output):
        return (number + 1) * float(output.double().square().sum())

    for block in blocks:
        expected, changes = [], [change(block, by) for by in (2.0, 0.5, 4.0)]
        for apply in changes:
            with apply():
                expected.append(sum(summarize(*numbered) for numbered in enumerate(whole(model, rows))))
        retried.start_at(block.stack.name, block.index)
        ran.clear()
        sums = list(retried.outputs_of_changes(changes, summarize))
        assert sums == pytest.approx(expected, rel=1e-4)
        assert len({round(value, 3) for value in expected}) == len(changes)
        if block.stack.name == blocks[-1].stack.name and block.index < blocks[-1].index:
            assert len(ran) < len(changes) * len(rows.batches)


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_unchanged_prefix_is_not_run_again(family, tmp_path):
    model = tiny_model(family)
    rows, blocks, ran = rows_for(model), blocks_of(model), []
    for index, block in enumerate(blocks):
        product = model.get_submodule(block.parts[-1].linear_layers[-1])
        product.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    retried = PrefixCachedModel(model, rows.batches, tmp_path)
    for index, block in enumerate(blocks):
        retried.start_at(block.stack.name, block.index)
        ran.clear()
        list(retried.outputs())
        assert sorted(ran) == sorted([*range(index, len(blocks))] * len(rows.batches))


def test_model_with_repeated_block_is_run_in_full(tmp_path):
    model = tiny_model("bert")
    layers = model.get_submodule(blocks_of(model)[0].stack.module_path)
    layers[2] = layers[0]
    rows = rows_for(model)
    retried = PrefixCachedModel(model, rows.batches, tmp_path)
    retried.start_at("layers", 2)
    scaled(model, blocks_of(model)[0], 2.0)  # which is the last one too
    assert equal(list(retried.outputs()), whole(model, rows))
