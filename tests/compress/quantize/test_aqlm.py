"""AQLM: beam search against brute force, layers and blocks against their start, GPTQ and float outputs."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from smelt.calibration.statistics import empty_statistics
from smelt.compress.quantize import aqlm as module
from smelt.compress.quantize.aqlm import AdditiveWeights, beam_search, fit_layer
from smelt.compress.quantize.gptq import column_updates, gptq_quantize
from smelt.compress.quantize.plan_layers import (
    dequantize_codes,
    quantize_module,
    round_to_nearest,
    scheme_grid,
)
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize, storage_warnings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight, default_options, find_scheme
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, tiny

OPTIONS = {"num_codebooks": 4, "nbits_per_codebook": 4}


def correlated_inputs(tokens, width):
    return torch.randn(tokens, width) @ torch.randn(width, width)


def drawn_start(rows, groups, count, size):
    """Random codes of random codebooks; a weight; a second moment."""
    codes = torch.randint(0, size, (rows, groups, count), dtype=torch.uint8)
    grid = {"scales": torch.rand(rows, 1) + 0.5, "codebooks": torch.randn(count, size, 8)}
    x = correlated_inputs(200, 8 * groups)
    return torch.randn(rows, 8 * groups), UnpackedWeights(codes, grid), x.T @ x / len(x)


def row_errors(weight, start, codes, moment):
    off = AdditiveWeights(UnpackedWeights(codes, start.qparams), weight.shape[1])().detach() - weight
    return ((off @ moment) * off).sum(dim=1)


def test_search_with_full_beam_equals_brute_force():
    """Of all 3^4 codes of a row; a full beam holds every hypothesis that the last codes depend on."""
    torch.manual_seed(0)
    weight, start, moment = drawn_start(rows=5, groups=2, count=2, size=3)
    every = torch.tensor(list(itertools.product(range(3), repeat=4)), dtype=torch.uint8).view(-1, 1, 2, 2)
    errors = torch.stack([row_errors(weight, start, one.expand(5, 2, 2), moment) for one in every])
    codes = beam_search(weight, start, moment, beam_size=81)
    assert row_errors(weight, start, codes, moment).allclose(errors.amin(dim=0), rtol=1e-4)
    assert codes.equal(every[errors.argmin(dim=0), 0])


@pytest.mark.parametrize("beam_size", [1, 4])
def test_narrow_search_lowers_error_of_every_row(beam_size):
    torch.manual_seed(1)
    weight, start, moment = drawn_start(rows=16, groups=6, count=2, size=16)
    before = row_errors(weight, start, start.q_weight, moment)
    after = row_errors(weight, start, beam_search(weight, start, moment, beam_size), moment)
    assert bool((after < 0.8 * before).all())
    wide = row_errors(weight, start, beam_search(weight, start, moment, 16), moment)
    assert float(after.sum()) >= float(wide.sum())


def test_layer_error_is_below_start_and_gptq_at_equal_bits(monkeypatch):
    monkeypatch.setattr(module, "_MAX_TURNS", 2)
    torch.manual_seed(0)
    weight, x = torch.randn(256, 128), correlated_inputs(1280, 128)
    moment, scheme = x.T @ x / len(x), find_scheme("additive")
    start = round_to_nearest(weight, scheme, OPTIONS)
    fitted = fit_layer(weight, moment, start)
    int2, statistics = find_scheme("int2"), empty_statistics(128, second=True)
    statistics.update(x)
    options = default_options(int2) | {"group_size": 32}
    updates = column_updates(statistics, "static")
    gptq = gptq_quantize(weight, updates, int2, options, scheme_grid)

    def error(codes, kind, kind_options):
        off = dequantize_codes(codes, kind, kind_options, weight) - weight
        return float(((off @ moment) * off).sum())

    assert bits_per_weight(scheme, OPTIONS, 128, 256) < bits_per_weight(int2, options, 128)
    assert error(fitted, scheme, OPTIONS) < 0.7 * error(start, scheme, OPTIONS)
    assert error(fitted, scheme, OPTIONS) < error(gptq, int2, options)


SETTINGS = {
    "scheme": "additive",
    "method": "aqlm",
    "iterations": 15,
    "calibration_samples": 24,
    "nbits_per_codebook": 4,
}


def run(family, out, **settings):
    source = every_family.model_with_layers(family, 2)
    out.mkdir()
    task = every_family.FAMILIES[family].tasks[0]
    write = tiny.write_labeled if task == "text-classification" else tiny.write_pairs
    data = every_family.read_split(
        str(write(out.with_suffix(".jsonl"), rows=40)), task, every_family.Columns(), out
    )
    settings = QuantizeSettings(**SETTINGS | settings)
    return source, harness.run_stage(Quantize(), settings, source, out, task, data)


@pytest.mark.parametrize("family", ["marian", "bert"])
def test_layers_and_blocks_gain_over_codebooks_of_weights(family, tmp_path):
    source, ctx = run(family, tmp_path / "out")
    blocks = {block.module_path for block in blocks_of(load_model(source)[0])}
    layers, tuned = ctx.details["aqlm_layer_error"], ctx.details["aqlm_block_error"]
    assert set(tuned) == blocks
    assert max(tuned.values()) <= 1
    assert sum(layers.values()) / len(layers) < 0.9
    assert min(tuned.values()) < 1
    model = harness.load_output_model(ctx)
    assert sum(m.matrix.scheme.name == "additive" for m in model.modules() if hasattr(m, "matrix")) >= len(
        layers
    )


@pytest.mark.parametrize(("method", "scheme"), [("aqlm", "additive"), ("autoround", "int4")])
def test_pooler_is_quantized_where_texts_have_as_many_tokens_as_the_model_is_wide(method, scheme, tmp_path):
    """Both 32; the pooler gets one vector for each text, whose shape is then that of the attention mask."""
    source = every_family.model_with_layers("bert", 1)
    texts = ["a man in a red hat walks " * 8] * 3 + ["two dogs run " * 7] * 5  # some share a batch
    data = Split("x", tuple(Example(text, label=f"LABEL_{n % 2}") for n, text in enumerate(texts)))
    settings = QuantizeSettings(scheme=scheme, method=method, calibration_samples=8, iterations=1)
    ctx = harness.run_stage(Quantize(), settings, source, tmp_path / "out", "text-classification", data)
    pooler = harness.load_output_model(ctx).bert.pooler.dense
    assert pooler.matrix.scheme.name == scheme


def test_block_without_gain_keeps_codes_of_its_layers(tmp_path, monkeypatch):
    _, plain = run("bert", tmp_path / "plain", iterations=1)
    monkeypatch.setattr(module.BlockLoss, "on_other_samples", lambda *_: 1.5)
    _, ctx = run("bert", tmp_path / "out")
    assert set(ctx.details["aqlm_block_error"].values()) == {1.0}
    first, second = (harness.load_output_model(c).state_dict() for c in (plain, ctx))
    name = next(name for name in first if name.endswith("query.matrix.codes"))
    assert first[name].equal(second[name])


def test_non_finite_outputs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module.BlockLoss, "on_other_samples", lambda *_: float("nan"))
    with raises_code("non-finite-activations"):
        run("bert", tmp_path / "out", iterations=1)


def test_same_seed_gives_same_weights(tmp_path):
    first, second = (harness.load_output_model(run("bert", tmp_path / name)[1]).state_dict() for name in "ab")
    assert all(value.equal(second[name]) for name, value in first.items())


def test_codebooks_larger_than_codes_are_reported():
    options = {"num_codebooks": 1, "nbits_per_codebook": 4}
    for inputs, codes in ((256, []), (16, ["large-codebooks"])):
        model = nn.ModuleList([quantize_module(nn.Linear(inputs, 64), "additive", options)])
        assert message_codes(storage_warnings(model)) == codes


@pytest.mark.parametrize(
    ("count", "bits", "setting"),
    [(2, 8, "nbits_per_codebook"), (2, 4, "num_codebooks"), (1, 4, "scheme")],
)
def test_large_codebooks_are_reported_with_a_setting_that_makes_them_smaller(count, bits, setting):
    options = {"num_codebooks": count, "nbits_per_codebook": bits}
    model = nn.ModuleList([quantize_module(nn.Linear(16, 64), "additive", options)])
    assert [message.setting for message in storage_warnings(model)] == [setting]


def test_methods_on_a_grid_and_other_schemes_are_refused():
    assert QuantizeSettings(scheme="additive", method="aqlm").to_report()["iterations"] == 200
    assert not QuantizeSettings(scheme="additive").needs_calibration
    for method in ("gptq", "awq", "awq-gptq", "autoround", "hqq"):
        with raises_setting_codes("settings-conflict"):
            QuantizeSettings(scheme="additive", method=method)
    for name, scheme in SCHEMES.items():
        if not scheme.own_method:
            with raises_setting_codes("settings-conflict"):
                QuantizeSettings(scheme=name, method="aqlm")
    with raises_setting_codes("settings-conflict"):
        QuantizeSettings(**SETTINGS, low_rank_correction={"rank": 2})


def test_quantized_weights_cannot_be_trained_or_pruned(tmp_path):
    from smelt.compress.finetune import Finetune, FinetuneSettings
    from smelt.compress.prune.stage import Prune, PruneSettings

    settings = QuantizeSettings(scheme="additive", nbits_per_codebook=4)
    source = every_family.model_with_layers("bert", 1)
    ctx = every_family.run_stage(Quantize(), settings, source, "bert", tmp_path / "out")
    later = partial(every_family.run_stage, source=ctx.out, family="bert")
    with raises_code("behind-quantize", InputError):
        later(Finetune(), FinetuneSettings(max_steps=1), out=tmp_path / "trained")
    with raises_code("behind-quantize", InputError):
        settings = PruneSettings(targets=["ffn"], keep_ratio=0.5, calibration_samples=4)
        later(Prune(), settings, out=tmp_path / "pruned")
