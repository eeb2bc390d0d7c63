"""The stage on models of every kind, and zeros that last."""

import itertools
from pathlib import Path

import pytest
import torch

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.compress.sparsify.methods import registry
from smelt.compress.sparsify.methods.registry import SPARSITY_METHODS
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from smelt.models.families.registry import blocks_of
from smelt.training.lora import LoraAdapters
from smelt.training.settings import LoraSettings
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family

FAMILIES = ("llama", "t5", "gpt2", "bart")
TRAIN = FinetuneSettings(
    max_steps=3, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2, weight_decay=0.1
)


def products(model):
    """The matrices of all products of the blocks by name."""
    names = [n for b in blocks_of(model) for p in b.parts for n in p.linear_layers]
    return {name: model.get_submodule(name).weight.detach() for name in dict.fromkeys(names)}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A BERT with 2 of 4 weights by SparseGPT, and the context of the stage."""
    out = tmp_path_factory.mktemp("sparse") / "out"
    settings = SparsifySettings(pattern="2:4")
    return every_family.run_stage(
        Sparsify(), settings, every_family.model_with_layers("bert", 2), "bert", out
    )


@pytest.mark.parametrize(
    ("family", "method"),
    [*zip(itertools.cycle(FAMILIES), SPARSITY_METHODS, strict=False)],
)
def test_half_of_each_linear_layer_is_zero(family, method, tmp_path):
    source = every_family.model_with_layers(family, 2)
    ctx = every_family.run_stage(
        Sparsify(), SparsifySettings(method=method), source, family, tmp_path / "out"
    )
    model = harness.load_output_model(ctx)
    weights = products(model)
    for name, weight in weights.items():
        assert abs(float((weight == 0).float().mean()) - 0.5) < 0.02, name
        assert ctx.details["sparsity_by_layer"][name] == pytest.approx(0.5, abs=0.02)
    zeros = sum(int((w == 0).sum()) for w in weights.values())
    assert ctx.details["zeros"] == zeros
    before = load_model(source)[0].state_dict()
    masked = {f"{name}.weight" for name in weights}
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items() if n not in masked)


def test_two_of_four_weights_are_kept(sparse):
    for weight in products(harness.load_output_model(sparse)).values():
        assert ((weight.reshape(-1, 4) != 0).sum(dim=1) == 2).all()
    assert sparse.details["sparsity"] == 0.5
    (warning,) = [w for w in sparse.warnings if w.code == "zeros-not-faster"]
    assert all(value in warning.message for value in ("50.0%", "12 layers"))


def test_training_keeps_zeros_and_updates_other_weights(sparse, tmp_path):
    before = products(harness.load_output_model(sparse))
    ctx = every_family.run_stage(Finetune(), TRAIN, sparse.out, "bert", tmp_path / "out")
    for name, weight in products(harness.load_output_model(ctx)).items():
        zeros = before[name] == 0
        assert (weight[zeros] == 0).all()
        assert (weight[~zeros] != before[name][~zeros]).float().mean() > 0.9
    assert read_edits(ctx.out) == read_edits(sparse.out)
    assert {edit["op"] for edit in read_edits(ctx.out)} == {"mask"}


def test_lora_keeps_zeros_and_merged_model_equals_trained_model(sparse, tmp_path):
    pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
    before = products(harness.load_output_model(sparse))
    settings = TRAIN.model_copy(update={"lora": LoraSettings(r=2)})
    ctx = every_family.run_stage(Finetune(), settings, sparse.out, "bert", tmp_path / "out")
    for name, weight in products(harness.load_output_model(ctx)).items():
        assert ((weight == 0) == (before[name] == 0)).all()
        assert not torch.equal(weight, before[name])
    model, _ = load_model(sparse.out)
    adapters = LoraAdapters(model, LoraSettings(r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    trained = harness.logits(model)
    with adapters.as_stored():
        torch.testing.assert_close(harness.logits(model), trained, rtol=1e-4, atol=1e-4)


def test_pruned_sparse_model_keeps_zeros(sparse, tmp_path):
    settings = PruneSettings(keep_ratio=0.5, importance="magnitude")
    ctx = every_family.run_stage(Prune(), settings, sparse.out, "bert", tmp_path / "out")
    assert len([edit for edit in read_edits(ctx.out) if edit["op"] == "mask"]) == 12
    model = harness.load_output_model(ctx)
    for weight in products(model).values():
        assert 0.3 < float((weight == 0).float().mean()) < 0.6  # units with fewer zeros matter more
    trained = every_family.run_stage(Finetune(), TRAIN, ctx.out, "bert", tmp_path / "trained")
    after = products(harness.load_output_model(trained))
    assert all((after[n][w == 0] == 0).all() for n, w in products(model).items())


def test_sparse_model_keeps_its_zeros_when_sparsified_again(sparse, tmp_path):
    settings = SparsifySettings(method="sparsegpt", sparsity=0.4)
    ctx = every_family.run_stage(Sparsify(), settings, sparse.out, "bert", tmp_path / "out")
    before = products(harness.load_output_model(sparse))
    assert all((w[before[n] == 0] == 0).all() for n, w in products(harness.load_output_model(ctx)).items())


def test_shared_layers_are_sparsified_once(tmp_path):
    source = every_family.model_with_layers("bert", 2)
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(), source, "bert", tmp_path / "shared"
    ).out
    ctx = every_family.run_stage(Sparsify(), SparsifySettings(), shared, "bert", tmp_path / "out")
    assert len(ctx.details["sparsity_by_layer"]) == 6
    assert {edit["op"] for edit in read_edits(ctx.out)} == {"share", "mask"}


def test_layers_not_fitting_pattern_are_not_sparsified(tmp_path):
    source = every_family.model_with_layers("bert", 1)  # 32 and 64 inputs
    settings = SparsifySettings(method="magnitude", pattern="1:64")
    ctx = every_family.run_stage(Sparsify(), settings, source, "bert", tmp_path / "a")
    assert list(ctx.details["sparsity_by_layer"]) == ["bert.encoder.layer.0.output.dense"]
    (warning,) = [w for w in ctx.warnings if w.code == "pattern-does-not-fit"]
    assert all(value in warning.message for value in ("5 layers", "64"))
    settings = SparsifySettings(method="magnitude", pattern="2:7")
    with raises_code("no-layer-selected", InputError):
        every_family.run_stage(Sparsify(), settings, source, "bert", tmp_path / "b")


def test_sparsify_settings_are_checked_and_determine_required_splits():
    assert Sparsify.needs_with(SparsifySettings(), {"train", "calibration"}) == {"calibration"}
    assert Sparsify.needs_with(SparsifySettings(method="wanda"), ()) == {"train"}
    assert Sparsify.needs_with(SparsifySettings(method="magnitude"), ()) == set()
    with raises_setting_codes("settings-conflict"):
        SparsifySettings(sparsity=0.5, pattern="2:4")
    with raises_setting_codes("wrong-pattern"):
        SparsifySettings(pattern="4:2")


def test_each_sparsity_method_module_is_registered():
    folder = Path(registry.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} == {*SPARSITY_METHODS, "registry", "__init__"}
