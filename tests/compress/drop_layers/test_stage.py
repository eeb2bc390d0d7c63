"""Layers that do nothing go, on every family, and the model computes the same and loads everywhere."""

import json
import re

import pytest
import torch
import transformers

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.export.package.huggingface import write_published_names
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import FAMILIES, blocks_of, family_of
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES, SEPARATE_BLOCKS


def _with_idle_layer(family, out):
    """Write a model of 3 layers a stack whose middle ones add nothing to the hidden states."""
    source = every_family.model_with_layers(family, 3)
    model, edits = load_model(source)
    for block in blocks_of(model):
        if block.index == 1:
            for part in block.parts:
                last = model.get_submodule(part.linear_layers[-1])
                torch.nn.init.zeros_(last.weight)
                if last.bias is not None:
                    torch.nn.init.zeros_(last.bias)
    out.mkdir()
    save_model(model, edits, out, source)
    return out


@pytest.mark.parametrize("family", SEPARATE_BLOCKS)
def test_idle_layer_is_removed_first(family, tmp_path):
    idle = _with_idle_layer(family, tmp_path / "idle")
    ctx = every_family.run_stage(
        DropLayers(),
        DropLayersSettings(keep_ratio=0.67, importance="block-influence", calibration_samples=4),
        idle,
        family,
        tmp_path / "out",
    )
    kept_layers = ctx.details["kept_layers"]
    assert list(kept_layers.values()) == [[0, 2]] * len(kept_layers)
    before, after = load_model(idle)[0], load_model(ctx.out)[0]
    if family_of(before).stacks(before.config.to_dict())[0].stream.pre_norm:
        # where norms stand behind the sum (BERT), an idle layer norms once more
        assert all(values[1] < 1e-6 for values in ctx.details["block_influence"].values())
        assert torch.allclose(harness.logits(after), harness.logits(before), atol=1e-5)
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]
    assert not (ctx.out / "structure.json").exists()
    assert not ctx.warnings


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_transformers_loads_shortened_model(family, tmp_path):
    settings = DropLayersSettings(keep_ratio=0.67, importance="loss", calibration_samples=4)
    ctx = every_family.run_stage(
        DropLayers(), settings, every_family.model_with_layers(family, 3), family, tmp_path / "out"
    )
    config = json.loads((ctx.out / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    expected = harness.logits(harness.load_output_model(ctx))
    if family == "mixtral":  # whose published names transformers reads, and computes in another order
        write_published_names(ctx.out)
    plain = kind.from_pretrained(ctx.out).eval()
    atol = 1e-5 if family == "mixtral" else 0
    torch.testing.assert_close(harness.logits(plain), expected, rtol=0, atol=atol)
    assert len(ctx.details["dropped"]) == len(ctx.details["kept_layers"])
    stacks = FAMILIES[family].stacks(config)
    assert all(stack.num_layers(config) == 2 for stack in stacks)
    for config_key in stacks[0].per_layer_keys:
        assert len(config[config_key]) == 2


def test_greedy_layer_losses_equal_models_without_the_layers(tmp_path):
    source = every_family.model_with_layers("llama", 3)
    rows = {"keep_ratio": 0.3, "importance": "loss", "calibration_samples": 4}
    ctx = every_family.run_stage(DropLayers(), DropLayersSettings(**rows), source, "llama", tmp_path / "out")
    first, second = (entry["layer"] for entry in ctx.details["dropped"])
    assert ctx.details["kept_layers"] == {"layers": sorted({0, 1, 2} - {first, second})}
    others = {}
    for number in range(3):  # each layer gone by hand: the loss of the rest, with nothing left to drop
        kept_layers = [index for index in range(3) if index != number]
        by_hand = every_family.run_stage(
            DropLayers(),
            DropLayersSettings(layers=kept_layers),
            source,
            "llama",
            tmp_path / f"without-{number}",
        )
        evaluation = every_family.run_stage(
            DropLayers(),
            DropLayersSettings(layers=1, importance="loss", calibration_samples=4),
            by_hand.out,
            "llama",
            tmp_path / f"again-{number}",
        )
        others[number] = evaluation.details["loss_before"]
    assert min(others, key=others.get) == first
    assert ctx.details["dropped"][0]["loss"] == pytest.approx(others[first], abs=1e-5)


@pytest.mark.parametrize(("settings", "expected_layers"), [
    ({"importance": "first"}, [0, 1]), ({"importance": "last"}, [2, 3]), ({"importance": "uniform"}, [0, 3]),
    ({"layers": [1, 3]}, [1, 3]),
])  # fmt: skip
def test_positional_importances_select_expected_layers(settings, expected_layers, tmp_path):
    ctx = harness.run_stage(
        DropLayers(),
        DropLayersSettings(**settings),
        every_family.model_with_layers("gpt2", 4),
        tmp_path / "out",
        "language-modeling",
    )
    assert ctx.details["kept_layers"] == {"layers": expected_layers}
    original = load_model(every_family.model_with_layers("gpt2", 4))[0]
    for new, old in enumerate(expected_layers):
        assert torch.equal(
            harness.load_output_model(ctx).transformer.h[new].mlp.c_fc.weight,
            original.transformer.h[old].mlp.c_fc.weight,
        )


def test_random_layers_depend_on_seed(tmp_path):
    source = every_family.model_with_layers("gpt2", 4)
    settings = DropLayersSettings(importance="random")
    selections = [
        harness.run_stage(
            DropLayers(), settings, source, tmp_path / str(index), "language-modeling", seed=seed
        ).details["kept_layers"]["layers"]
        for index, seed in enumerate([1, 1, 2, 3, 4])
    ]
    assert selections[0] == selections[1]
    assert len({tuple(layers) for layers in selections}) > 1


def test_explicitly_removed_layers_are_absent_during_selection(tmp_path):
    source = every_family.model_with_layers("marian", 3)
    by_hand = every_family.run_stage(
        DropLayers(), DropLayersSettings(encoder_layers=[1]), source, "marian", tmp_path / "by-hand"
    ).out
    rows = {"decoder_layers": 2, "importance": "loss", "calibration_samples": 4}
    at_once = every_family.run_stage(
        DropLayers(), DropLayersSettings(encoder_layers=[1], **rows), source, "marian", tmp_path / "at-once"
    )
    later = every_family.run_stage(
        DropLayers(), DropLayersSettings(**rows), by_hand, "marian", tmp_path / "later"
    )
    assert at_once.details["dropped"] == later.details["dropped"]
    assert at_once.details["loss_before"] == pytest.approx(later.details["loss_before"], abs=1e-5)


def test_shared_weights_move_to_next_layer_when_owner_is_dropped(tmp_path):
    shared = every_family.run_stage(
        ShareWeights(),
        ShareWeightsSettings(groups=1),
        every_family.model_with_layers("bert", 3),
        "bert",
        tmp_path / "shared",
    ).out
    ctx = harness.run_stage(
        DropLayers(), DropLayersSettings(layers=[1, 2]), shared, tmp_path / "out", "text-classification"
    )
    layers = harness.load_output_model(ctx).bert.encoder.layer
    assert layers[0].attention.self.query is layers[1].attention.self.query
    shared_layers = load_model(shared)[0].bert.encoder.layer
    assert torch.equal(layers[0].intermediate.dense.weight, shared_layers[1].intermediate.dense.weight)


def test_kept_layers_keep_quantized_weights(tmp_path):
    source = every_family.model_with_layers("llama", 3)
    coded = every_family.run_stage(Quantize(), QuantizeSettings(), source, "llama", tmp_path / "coded").out
    ctx = every_family.run_stage(
        DropLayers(), DropLayersSettings(layers=2, calibration_samples=4), coded, "llama", tmp_path / "out"
    )
    kept_layers = ctx.details["kept_layers"]["layers"]
    shortened, original = harness.load_output_model(ctx), load_model(coded)[0]
    for new, old in enumerate(kept_layers):
        matrix, original_matrix = (
            m.model.layers[index].mlp.up_proj.matrix for m, index in ((shortened, new), (original, old))
        )
        assert all(
            torch.equal(a, b) for a, b in zip(matrix.buffers(), original_matrix.buffers(), strict=True)
        )


def test_keep_ratio_that_removes_nothing_warns(tmp_path):
    ctx = every_family.run_stage(
        DropLayers(),
        DropLayersSettings(keep_ratio=0.9),
        every_family.model_with_layers("bert", 3),
        "bert",
        tmp_path / "out",
    )
    assert message_codes(ctx.warnings) == ["nothing-to-remove"]
    assert ctx.details["kept_layers"] == {"layers": [0, 1, 2]}


def test_missing_calibration_data_is_rejected(tmp_path):
    source = tiny.write_bert(tmp_path / "model")
    for importance in ("loss", "block-influence"):
        with raises_code("no-calibration-data", InputError):
            harness.run_stage(
                DropLayers(),
                DropLayersSettings(importance=importance),
                source,
                tmp_path / importance,
                "text-classification",
            )


@pytest.mark.parametrize("importance", ["loss", "block-influence"])
def test_layers_with_sole_remaining_part_are_kept(importance, tmp_path):
    """An earlier step left one attention and one ffn, of different layers: a single one has not both."""
    source = every_family.model_with_layers("llama", 3)
    for kind, number in (("attention", 0), ("ffn", 2)):
        settings = DropLayersSettings(targets=[kind], layers=[number], calibration_samples=4)
        source = every_family.run_stage(DropLayers(), settings, source, "llama", tmp_path / kind).out
    settings = DropLayersSettings(layers=1, importance=importance, calibration_samples=4)
    ctx = every_family.run_stage(DropLayers(), settings, source, "llama", tmp_path / "out")
    assert ctx.details["kept_layers"] == {"layers": [0, 2]}
    (warning,) = [message for message in ctx.warnings if message.code == "minimum-kept"]
    assert re.findall(r"\d+", warning.message) == ["2", "1"]
    first, second = blocks_of(load_model(ctx.out)[0])
    assert (bool(first.attentions), first.feed_forwards) == (True, ())
    assert (bool(second.attentions), bool(second.feed_forwards)) == (False, True)
