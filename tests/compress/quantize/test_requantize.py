"""Codes of a model that became smaller: those that are left are those that were there."""

import pytest
import torch

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.reconstruct import refit_layer
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import cut_neurons, find_groups, update_config
from smelt.compress.quantize.requantize import dequantize_model
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.core.artifact import MASTER_WEIGHTS_FILE, Artifact, Manifest
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import is_masked, read_edits
from smelt.quantization.layers import is_quantized
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import tiny

GROUP = 32
GROUPED = {"group_size": GROUP}
CODES = {
    "int8-dynamic": {"scheme": "int8-dynamic"},
    "one scale": {"scheme": "int8-dynamic", "granularity": "tensor"},
    "int8-static": {"scheme": "int8-static", "calibration_samples": 4, "sensitivity_samples": 0},
    "fp8": {"scheme": "fp8", "calibration_samples": 4, "sensitivity_samples": 0},
    "nvfp4": {"scheme": "nvfp4", "calibration_samples": 4, "sensitivity_samples": 0},
    "int8-groupwise": {"scheme": "int8-groupwise", "symmetric": False, **GROUPED},
    "int4": {"scheme": "int4", **GROUPED},
    "int4, zero points": {"scheme": "int4", "symmetric": False, **GROUPED},
    "int3": {"scheme": "int3", **GROUPED}, "int2": {"scheme": "int2", **GROUPED},
    "kmeans4": {"scheme": "kmeans4", "group_size": 128}, "pow2": {"scheme": "pow2", **GROUPED},
    "mxfp4": {"scheme": "mxfp4"}, "ternary": {"scheme": "ternary", **GROUPED},
    "ternary rows": {"scheme": "ternary", "granularity": "channel", **GROUPED},
    "binary": {"scheme": "binary", **GROUPED}, "bnb-nf4": {"scheme": "bnb-nf4"},
    "bnb-int8": {"scheme": "bnb-int8"},
    "gptq": {"scheme": "int4", "method": "gptq", "calibration_samples": 4, **GROUPED},
    "awq": {"scheme": "int4", "method": "awq", "calibration_samples": 4, **GROUPED},
    "hqq": {"scheme": "int4", "method": "hqq", **GROUPED},
    "pair": {"scheme": "int4", "low_rank_correction": {"rank": 2}, **GROUPED},
}  # fmt: skip
UP = "bert.encoder.layer.{}.intermediate.dense"
DOWN = "bert.encoder.layer.{}.output.dense"


def artifact(folder, key, stage="model", settings=None, parent=None):
    manifest = Manifest(
        key=key * 64, format="torch", task="text-classification", stage=stage, settings=settings or {},
        seed=0, parent=parent and parent * 64, versions={},
    )  # fmt: skip
    return Artifact(folder, manifest)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tiny.write_labeled(tmp_path_factory.mktemp("rows") / "rows.jsonl")
    split = read_split(str(path), "text-classification", Columns(), path.parent)
    return {"train": split, "validation": split}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, data):
    """What makes, once each, a tiny BERT of 64 neurons a layer with codes; it returns both artifacts."""
    cache = {}

    def quantized(name):
        if name not in cache:
            folder = tmp_path_factory.mktemp("codes")
            floats = tiny.write_bert(folder / "model", intermediate_size=2 * GROUP)
            settings = QuantizeSettings.model_validate(CODES[name])
            (folder / "out").mkdir()
            first = artifact(floats, "a")
            ctx = harness.make_context(folder / "out", "text-classification", data=data)
            Quantize()(first, settings, ctx)
            dumped = settings.model_dump(mode="json")
            cache[name] = first, artifact(folder / "out", "b", "quantize", dumped, "a")
        return cache[name]

    return quantized


def context(out, data, *above):
    out.mkdir(exist_ok=True)
    ancestors = dict(zip(("model", "quantize"), above, strict=False))
    return harness.make_context(out, "text-classification", data=data, ancestors=ancestors)


def coded(model):
    """The layers of codes by name, without factors and pairs; tables are left out."""
    layers = {}
    for name, module in model.named_modules():
        if is_quantized(module):
            layers[name.removesuffix(".linear").removesuffix(".coded").removesuffix(".linear")] = module
    return layers


def test_all_schemes_are_covered():
    from smelt.quantization.schemes.registry import SCHEMES

    with_own_method = {
        name for name, scheme in SCHEMES.items() if scheme.own_method
    }  # refused by the later stages
    assert {settings["scheme"] for settings in CODES.values()} == set(SCHEMES) - with_own_method


@pytest.mark.parametrize("name", CODES)
def test_unchanged_model_requantizes_to_same_weights(name, quantized, data, tmp_path):
    first, src = quantized(name)
    ctx = context(tmp_path / "out", data, first, src)
    model, edits = load_model(src.path)
    edits, codes = dequantize_model(model, edits, src, ctx, "prune", everywhere=True)
    assert not any(is_quantized(module) for module in model.modules())
    assert not {edit["op"] for edit in edits} & {"quantize", "scale", "adapter"}
    edits = codes.requantize(model, edits, ctx)
    save_model(model, edits, ctx.out, src.path)
    assert ctx.details["codes_kept"] == 1
    before, after = (load_model(folder)[0].state_dict() for folder in (src.path, ctx.out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("name", CODES)
def test_uncut_groups_keep_quantized_weights_and_scales(name, quantized, data, tmp_path):
    first, src = quantized(name)
    ctx = context(tmp_path / "out", data, first, src)
    model, edits = load_model(src.path)
    edits, codes = dequantize_model(model, edits, src, ctx, "prune")
    kept_indices = torch.arange(GROUP, 2 * GROUP)  # the second group of two
    for block in find_groups(model)[1]:
        cut_neurons(model, edits, block, kept_indices)
    edits = codes.requantize(model, update_config(model, edits), ctx)
    save_model(model, edits, ctx.out, src.path)
    before, after = (coded(load_model(folder)[0]) for folder in (src.path, ctx.out))
    assert before.keys() == after.keys()
    for layer, module in after.items():
        old, new = before[layer].matrix, module.matrix
        values, width = old.dequantize(), old.width
        old_values = old.unpack().q_weight.flatten(1)[:, :width]
        if layer.endswith("intermediate.dense"):
            values, old_values = values[kept_indices], old_values[kept_indices]
        elif layer.endswith("output.dense") and "attention" not in layer:
            values, old_values, width = values[:, kept_indices], old_values[:, kept_indices], GROUP
        assert torch.equal(new.unpack().q_weight.flatten(1)[:, :width], old_values), layer
        assert torch.equal(new.dequantize(), values), layer
        for part in ("input_scale",):
            assert not old.has(part) or torch.equal(old.tensor(part), new.tensor(part))
    assert ctx.details["codes_kept"] == 1
    assert "requantized_layers" not in ctx.details


@pytest.mark.parametrize(("name", "behind"), [("int4", "floats"), ("gptq", "codes"), ("awq", "codes")])
def test_cut_group_is_requantized_from_float_or_dequantized_weights(name, behind, quantized, data, tmp_path):
    first, src = quantized(name)
    ctx = context(tmp_path / "out", data, first, src)
    model, edits = load_model(src.path)
    edits, codes = dequantize_model(model, edits, src, ctx, "prune")
    kept_indices = torch.arange(0, 2 * GROUP, 2)[: GROUP - 2]  # of both groups
    for block in find_groups(model)[1]:
        cut_neurons(model, edits, block, kept_indices)
    codes.requantize(model, edits, ctx)
    down = DOWN.format(0)
    old = coded(load_model(src.path)[0])[down].matrix
    floats = load_model(first.path)[0].get_submodule(down).weight.detach()
    start = (floats if behind == "floats" else old.dequantize())[:, kept_indices]
    scheme, options = old.scheme, old.options
    groups = torch.nn.functional.pad(start, (0, GROUP - len(kept_indices))).unflatten(1, (1, GROUP))
    grid = scheme.compute_qparams(groups, len(kept_indices), options)
    new = coded(model)[down].matrix
    assert torch.equal(new.tensor("scales"), grid["scales"])
    assert torch.equal(new.unpack().q_weight, scheme.quantize(groups, grid, options))
    assert down in ctx.details["requantized_layers"]
    assert UP.format(0) not in ctx.details["requantized_layers"]  # rows go with their scales


def test_refit_undone_by_rounding_is_skipped(tmp_path):
    torch.manual_seed(0)
    x, kept_indices = torch.randn(60, 6) @ torch.randn(6, 6), torch.tensor([0, 2, 5])
    from smelt.calibration.statistics import empty_statistics

    statistics = empty_statistics(6, second=True)
    statistics.update(x)

    def cut():
        layer = torch.nn.Linear(6, 4, bias=False)
        full_weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        layer.weight = torch.nn.Parameter(full_weight[:, kept_indices].clone())
        layer.in_features = 3
        return torch.nn.ModuleDict({"layer": layer}), full_weight

    model, full_weight = cut()
    exact = refit_layer(model, "layer", full_weight, kept_indices, statistics)
    fitted = model["layer"].weight.detach().clone()
    model, full_weight = cut()
    assert refit_layer(
        model, "layer", full_weight, kept_indices, statistics, lambda weight, seen: weight.float()
    ) == pytest.approx(exact)
    model, full_weight = cut()

    def round_badly(weight, seen):  # what is on the grid already stays, all else is rounded to nothing
        return (
            weight.float()
            if torch.equal(weight.float(), full_weight[:, kept_indices])
            else torch.full((4, 3), 50.0)
        )

    assert refit_layer(model, "layer", full_weight, kept_indices, statistics, round_badly) >= exact
    assert torch.equal(model["layer"].weight, full_weight[:, kept_indices])
    assert not torch.equal(fitted, full_weight[:, kept_indices])


@pytest.mark.parametrize("name", ["int8-dynamic", "int4", "gptq"])
def test_reconstruction_lowers_error_of_pruned_quantized_model(name, quantized, data, tmp_path):
    first, src = quantized(name)
    original, errors = load_model(src.path)[0], {}
    for compensate in (False, True):
        ctx = context(tmp_path / str(compensate), data, first, src)
        settings = PruneSettings(keep_ratio=0.5, importance="magnitude", reconstruct=compensate)
        Prune()(src, settings, ctx)
        pruned_logits = harness.logits(load_model(ctx.out)[0], texts=32)
        errors[compensate] = float((pruned_logits - harness.logits(original, texts=32)).pow(2).mean())
    assert errors[True] < errors[False]


@pytest.mark.parametrize("name", [n for n in CODES if n not in ("kmeans4", "binary", "pair")])
def test_sparsify_keeps_scales_and_nonzero_quantized_weights(name, quantized, data, tmp_path):
    first, src = quantized(name)
    ctx = context(tmp_path / "out", data, first, src)
    Sparsify()(src, SparsifySettings(method="wanda", pattern="2:4", calibration_samples=4), ctx)
    model = load_model(ctx.out)[0]
    before, after = coded(load_model(src.path)[0]), coded(model)
    masked = {layer for layer, module in after.items() if is_masked(module)}
    assert masked == {layer for layer in after if ".layer." in layer}
    for layer in masked:
        old, new = before[layer].matrix, after[layer].matrix
        assert all(torch.equal(old.unpack().qparams[n], t) for n, t in new.unpack().qparams.items())
        values = new.dequantize()
        assert ((values.reshape(-1, 4) != 0).sum(dim=1) <= 2).all()
        nonzero = values != 0
        assert torch.equal(values[nonzero], old.dequantize()[nonzero])
    assert {edit["op"] for edit in read_edits(ctx.out)[-len(masked) :]} == {"mask"}


@pytest.mark.parametrize(("name", "saves_master"), [("int8-dynamic", True), ("int4, zero points", False)])
def test_qat_keeps_sparsity(name, saves_master, quantized, data, tmp_path):
    first, src = quantized(name)
    ctx = context(tmp_path / "sparse", data, first, src)
    Sparsify()(src, SparsifySettings(method="magnitude", sparsity=0.5), ctx)
    if not saves_master:
        (ctx.out / MASTER_WEIGHTS_FILE).unlink()
    sparse = artifact(ctx.out, "c", "sparsify", parent="b")
    ctx = context(tmp_path / "out", data, first, src)
    settings = FinetuneSettings(max_steps=3, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2)
    Finetune()(sparse, settings, ctx)
    assert ctx.details["latent_weights"] == ("kept" if saves_master else "codes")
    before, after = coded(load_model(sparse.path)[0]), coded(load_model(ctx.out)[0])
    for layer, module in before.items():
        if is_masked(module):
            assert is_masked(after[layer])
            zeros = module.matrix.dequantize() == 0
            assert (after[layer].matrix.dequantize()[zeros] == 0).float().mean() > (
                0.95 if saves_master else 0.999
            )
            assert not torch.equal(after[layer].matrix.dequantize(), module.matrix.dequantize())


def test_master_weights_are_pruned_with_quantized_weights(quantized, data, tmp_path):
    first, src = quantized("ternary")
    ctx = context(tmp_path / "trained", data, first, src)
    settings = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2)
    Finetune()(src, settings, ctx)
    trained = artifact(ctx.out, "c", "finetune", parent="b")
    ctx = context(tmp_path / "cut", data, first, src)
    Prune()(trained, PruneSettings(keep_ratio=0.5, importance="magnitude", reconstruct=False), ctx)
    assert ctx.details["latent_bytes"] == (ctx.out / MASTER_WEIGHTS_FILE).stat().st_size
    cut = artifact(ctx.out, "d", "prune", parent="c")
    ctx = context(tmp_path / "again", data, first, src)
    Finetune()(cut, settings, ctx)
    assert ctx.details["latent_weights"] == "kept"
    assert not {"master-weights-mismatch", "master-weights-outdated"} & set(message_codes(ctx.warnings))


@pytest.mark.parametrize(
    ("name", "chain"), [("binary", "int8-dynamic"), ("kmeans4", "int8-dynamic"), ("pair", "- finetune: {}")]
)
def test_schemes_without_zero_are_rejected_with_valid_chain(name, chain, quantized, data, tmp_path):
    first, src = quantized(name)
    with pytest.raises(InputError) as caught:
        Sparsify()(src, SparsifySettings(method="magnitude"), context(tmp_path / "out", data, first, src))
    assert caught.value.code == "behind-quantize"
    assert chain in str(caught.value)


def test_split_layers_are_rejected_for_prune_and_sparsify(quantized, data, tmp_path):
    codes = {"weight_splitting": True}
    first, src = quantized("ternary")
    ctx = context(tmp_path / "trained", data, first, src)
    training = {"max_steps": 1, "batch_size": 4, "num_evals": 0, "precision": "fp32", "qat": codes}
    Finetune()(src, FinetuneSettings.model_validate(training), ctx)
    trained = artifact(ctx.out, "c", "finetune", parent="b")
    for stage, settings in (
        (Prune(), PruneSettings(importance="magnitude")),
        (Sparsify(), SparsifySettings(method="magnitude")),
    ):
        with pytest.raises(InputError) as caught:
            stage(trained, settings, context(tmp_path / stage.name, data, first, src))
        assert caught.value.code == "behind-quantize"
