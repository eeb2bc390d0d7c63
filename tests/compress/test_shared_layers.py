"""What sharing made one stays one in every stage after it, on models of several families."""

import hashlib
from collections import Counter

import onnx
import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import blocks_of
from tests.support import harness
from tests.support.graphs.ort_sessions import needs_vnni
from tests.support.models import every_family
from tests.support.pairs.matrix import is_full_matrix
from tests.support.weight_sharing import (
    assert_first_two_shared,
    linear_names_by_block,
    share_weights,
    three_layer_model,
)

SOME = ["gpt2", "phi3", "t5"] if is_full_matrix() else ["phi3", "t5"]


@pytest.mark.parametrize("family", SOME)
def test_shared_layers_are_shared_after_training(family, tmp_path):
    source = share_weights(family, tmp_path / "shared")
    settings = FinetuneSettings(max_steps=2, batch_size=4, num_evals=1, precision="fp32", learning_rate=1e-2)
    trained = every_family.run_stage(Finetune(), settings, source, family, tmp_path / "trained").out
    model, _ = load_model(trained)
    assert_first_two_shared(model)
    before, after = (load_file(f / "model.safetensors") for f in (source, trained))
    assert before.keys() == after.keys()
    name = blocks_of(model)[0].feed_forwards[0].down
    assert not torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])


@pytest.mark.parametrize("family", SOME)
def test_shared_layers_are_pruned_once(family, tmp_path):
    source = share_weights(family, tmp_path / "shared")
    settings = PruneSettings(importance="magnitude", keep_ratio=0.5, reconstruct=False)
    pruned = every_family.run_stage(Prune(), settings, source, family, tmp_path / "pruned").out
    model, _ = load_model(pruned)
    assert_first_two_shared(model)
    before, _ = load_model(source)
    for block in blocks_of(model):
        name = block.feed_forwards[0].down
        # half of it, to a multiple of 8; cut twice it would be a quarter
        assert model.get_submodule(name).in_features == before.get_submodule(name).in_features // 2
    assert torch.isfinite(harness.logits(model)).all()
    # and the same as when the copies are cut apart, where magnitude finds the same units
    unshared, edits = load_model(source)
    copies = tmp_path / "copies"
    copies.mkdir()
    for module in set(unshared.modules()):  # each layer gets a module of its own again
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not unshared.get_output_embeddings():
                setattr(module, name, _own(child))
    save_model(unshared, [e for e in edits if e["op"] != "share"], copies, source)
    cut = every_family.run_stage(Prune(), settings, copies, family, tmp_path / "cut").out
    torch.testing.assert_close(
        harness.logits(model), harness.logits(load_model(cut)[0]), atol=1e-5, rtol=1e-5
    )


def _own(linear):
    new = torch.nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    new.load_state_dict(linear.state_dict())
    return new


def test_taylor_counts_all_uses_of_shared_head(tmp_path):
    source = share_weights("bert", tmp_path / "shared", groups=1)
    ctx = every_family.run_stage(
        Prune(),
        PruneSettings(targets=["heads"], keep_ratio=0.5, calibration_samples=4),
        source,
        "bert",
        tmp_path / "pruned",
    )
    assert list(ctx.details["kept_heads"].values()) == [2]
    model, _ = load_model(ctx.out)
    heads = [model.get_submodule(b.attentions[0].name).num_attention_heads for b in blocks_of(model)]
    assert heads == [2, 2, 2]
    assert torch.isfinite(harness.logits(model)).all()


@pytest.mark.parametrize("family", SOME)
def test_factorized_shared_layers_share_one_low_rank_pair(family, tmp_path):
    source = share_weights(family, tmp_path / "shared")
    ctx = every_family.run_stage(
        Factorize(),
        FactorizeSettings(method="svd", optimize_for="size", rank=4),
        source,
        family,
        tmp_path / "pairs",
    )
    model, _ = load_model(ctx.out)
    assert_first_two_shared(model)
    assert all(
        hasattr(model.get_submodule(n), "down")
        for b in linear_names_by_block(model).values()
        for ns in b
        for n in ns
    )
    count = sum(len(blocks[0]) + len(blocks[2]) for blocks in linear_names_by_block(model).values())
    assert sum(name.startswith(_place(model)) for name in ctx.details["ranks"]) == count


def _place(model):
    return tuple({f"{block.stack.module_path}." for block in blocks_of(model)})


def test_shared_layer_with_one_excluded_name_is_not_factorized(tmp_path):
    source = share_weights("bert", tmp_path / "shared", groups=1)
    settings = FactorizeSettings(
        method="svd",
        optimize_for="size",
        rank=4,
        include=["*.1.intermediate*", "*.output.dense"],
        exclude=["*.2.output*"],
    )
    ctx = every_family.run_stage(Factorize(), settings, source, "bert", tmp_path / "pairs")
    assert sorted(ctx.details["ranks"]) == [
        "bert.encoder.layer.0.attention.output.dense",
        "bert.encoder.layer.0.intermediate.dense",
    ]


def test_shared_low_rank_layers_are_pruned_once(tmp_path):
    source = share_weights("marian", tmp_path / "shared")
    pairs = every_family.run_stage(
        Factorize(),
        FactorizeSettings(method="svd", optimize_for="size", rank=4),
        source,
        "marian",
        tmp_path / "pairs",
    ).out
    settings = PruneSettings(targets=["heads", "ffn"], keep_ratio=0.5, importance="magnitude")
    pruned = every_family.run_stage(Prune(), settings, pairs, "marian", tmp_path / "pruned").out
    model, _ = load_model(pruned)
    assert_first_two_shared(model)
    assert model.get_submodule("model.encoder.layers.1.fc2").in_features == 32


@pytest.mark.parametrize(
    ("family", "scheme"), [("marian", "int8-dynamic"), ("t5", "int4"), ("qwen3", "binary")]
)
def test_quantized_shared_layers_are_stored_once(family, scheme, tmp_path):
    source = share_weights(family, tmp_path / "shared")
    options = {} if scheme == "int8-dynamic" else {"group_size": 32}
    settings = QuantizeSettings(scheme=scheme, **options)
    folders = [every_family.run_stage(Quantize(), settings, s, family, tmp_path / f"{n}").out
            for n, s in enumerate((three_layer_model(family), source))]  # fmt: skip
    model, edits = load_model(folders[1])
    assert_first_two_shared(model)
    unshared_tensors, shared_tensors = (load_file(f / "model.safetensors") for f in folders)
    seconds = {n for blocks in linear_names_by_block(model).values() for n in blocks[1]}
    assert unshared_tensors.keys() - shared_tensors.keys() == {
        n
        for n in unshared_tensors
        if n.rpartition(".matrix.")[0] in seconds or n.rpartition(".bias")[0] in seconds
    }
    assert sum(e["op"] == "quantize" and e["module"] in seconds for e in edits) == 0
    trained = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32")
    if scheme == "binary":  # through the codes
        model, _ = load_model(
            every_family.run_stage(Finetune(), trained, folders[1], family, tmp_path / "trained").out
        )
        assert_first_two_shared(model)


def test_shared_layer_with_one_excluded_name_is_not_quantized(tmp_path):
    source = share_weights("bert", tmp_path / "shared")
    settings = QuantizeSettings(exclude=["*.layer.1.output.dense"])
    ctx = every_family.run_stage(Quantize(), settings, source, "bert", tmp_path / "codes")
    assert ctx.details["float_linear_layers"] == ["bert.encoder.layer.0.output.dense"]


@pytest.mark.parametrize(
    ("family", "scheme"), [("bert", None), pytest.param("t5", "int8-dynamic", marks=needs_vnni)]
)
def test_graphs_store_shared_matrices_once(family, scheme, tmp_path):
    source = share_weights(family, tmp_path / "shared")
    if scheme:
        settings = QuantizeSettings(scheme=scheme)
        source = every_family.run_stage(Quantize(), settings, source, family, tmp_path / "codes").out
    ctx = every_family.run_stage(Onnx(), OnnxSettings(), source, family, tmp_path / "graphs")
    assert set(ctx.details["parity"]) == set(ctx.details["graphs"])  # a graph that disagrees raises
    for path in ctx.out.glob("*.onnx"):
        matrix_counts = Counter(
            (tuple(t.dims), hashlib.sha256(t.raw_data).hexdigest())
            for t in onnx.load(path).graph.initializer
            if len(t.dims) > 1 and len(t.raw_data) >= 256
        )
        assert max(matrix_counts.values()) == 1
