"""A shared matrix and thin differences: against the decomposition by numpy, and through what comes after."""

import json

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.factorize.svd import decompose_shared
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings, share_layers
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.compress.trim_vocabulary.vocabulary_rows import keep_vocabulary_rows
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.edits import is_masked, read_edits
from smelt.models.layers import SharedLinear
from smelt.pipeline.inspect.model_folder import check_file_consistency
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family
from tests.support.models.every_family import SEPARATE_BLOCKS
from tests.support.weight_sharing import linear_names_by_block, three_layer_model


def settings(rank=4, **more):
    return ShareWeightsSettings.model_validate(
        {"low_rank_delta": {"rank": rank, **more.pop("also", {})}, **more}
    )


def shared(family, out, rank=4, **more):
    return every_family.run_stage(
        ShareWeights(), settings(rank, **more), three_layer_model(family), family, out
    )


def drawn(count=3, rows=10, columns=14):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(rows, columns, generator=draw) for _ in range(count)]


@pytest.mark.parametrize("take", ["first", "mean"])
def test_deltas_equal_truncated_svd_of_differences(take):
    weights = drawn()
    stacked = np.stack([w.double().numpy() for w in weights])
    start = stacked[0] if take == "first" else stacked.mean(axis=0)
    shared_matrix, pairs, lost = decompose_shared(weights, torch.tensor(start), 3, 1)
    np.testing.assert_array_equal(shared_matrix.numpy(), start)
    residual = 0.0
    for weight, (up, down) in zip(stacked, pairs, strict=True):
        u, s, vt = np.linalg.svd(weight - start)
        np.testing.assert_allclose((up @ down).numpy(), (u[:, :3] * s[:3]) @ vt[:3], atol=1e-10)
        residual += (s[3:] ** 2).sum()
    spread = ((stacked - stacked.mean(axis=0)) ** 2).sum()
    assert lost == pytest.approx([residual / spread])


def test_alternating_iterations_reduce_error_and_update_mean():
    weights = drawn()
    shared_matrix, _, lost = decompose_shared(weights, weights[0], 3, 6)
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.8 * lost[0]
    before, products, _ = decompose_shared(weights, weights[0], 3, 5)
    residuals = torch.stack([w.double() - up @ down for w, (up, down) in zip(weights, products, strict=True)])
    torch.testing.assert_close(shared_matrix, residuals.mean(dim=0))
    assert not torch.allclose(shared_matrix, before)


@pytest.mark.parametrize("family", SEPARATE_BLOCKS)
def test_full_rank_deltas_preserve_outputs_and_share_weights(family, tmp_path):
    ctx = shared(family, tmp_path / "out", rank=999)
    model, plain = harness.load_output_model(ctx), load_model(three_layer_model(family))[0]
    torch.testing.assert_close(harness.logits(model), harness.logits(plain), rtol=1e-3, atol=1e-4)
    names = set(load_file(ctx.out / "model.safetensors"))
    for blocks in linear_names_by_block(model).values():
        for first, second, third in zip(*blocks, strict=True):
            first_layer, second_layer = model.get_submodule(first), model.get_submodule(second)
            assert isinstance(first_layer, SharedLinear)
            assert first_layer is not second_layer
            assert first_layer.shared is second_layer.shared
            assert first_layer.difference is not second_layer.difference
            assert type(model.get_submodule(third)) is torch.nn.Linear
            assert len({f"{first}.shared.weight", f"{second}.shared.weight"} & names) == 1
    assert ctx.warnings == []
    assert max(ctx.details["lost"].values()) < 1e-10


def test_delta_rank_and_parameter_count_match_settings(tmp_path):
    ctx = shared("bert", tmp_path / "out", rank=4)
    model, plain = harness.load_output_model(ctx), load_model(three_layer_model("bert"))[0]
    first, second, _ = (layer.output.dense for layer in model.bert.encoder.layer)
    original_layers = [layer.output.dense for layer in plain.bert.encoder.layer]
    assert (first.rank, second.rank) == (4, 4)
    assert torch.equal(first.shared.weight, original_layers[0].weight)  # take: first
    assert float(first.difference.up.weight.detach().abs().max()) == 0.0
    u, s, vt = np.linalg.svd(
        (original_layers[1].weight - original_layers[0].weight).detach().double().numpy()
    )
    product = second.difference.up.weight @ second.difference.down.weight
    np.testing.assert_allclose(product.detach().numpy(), (u[:, :4] * s[:4]) @ vt[:4], atol=1e-5)
    assert torch.equal(second.difference.up.bias, original_layers[1].bias)
    saved = sum(
        plain.get_submodule(a).weight.numel() - 2 * 4 * sum(plain.get_submodule(a).weight.shape)
        for blocks in linear_names_by_block(plain).values()
        for a, _, _ in zip(*blocks, strict=True)
    )
    assert ctx.details["parameters_before"] - ctx.details["parameters_after"] == saved


def test_graph_stores_shared_matrix_once(tmp_path):
    shared_folder = shared("bert", tmp_path / "made", rank=3, targets=["ffn"]).out

    def matrices(folder, name):
        ctx = every_family.run_stage(Onnx(), OnnxSettings(), folder, "bert", tmp_path / name)
        (path,) = ctx.out.glob("*.onnx")
        sizes = [sorted(t.dims) for t in onnx.load(path, load_external_data=False).graph.initializer]
        return sizes.count([32, 64]), sizes.count([3, 32]), sizes.count([3, 64])

    assert matrices(three_layer_model("bert"), "apart") == (6, 0, 0)  # of three layers up and down
    assert matrices(shared_folder, "shared") == (
        4,
        4,
        4,
    )  # of the first two one of each, and two thin differences


def test_shared_weights_and_deltas_are_trained(tmp_path):
    shared_ctx = shared("bert", tmp_path / "made")
    train = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2)
    trained = every_family.run_stage(Finetune(), train, shared_ctx.out, "bert", tmp_path / "trained").out
    after = load_file(trained / "model.safetensors")
    before = load_file(shared_ctx.out / "model.safetensors")
    moved = {n for n, t in after.items() if not torch.equal(t, before[n])}
    parts = {n.split(".")[-2] for n in moved if ".shared." in n or ".difference." in n}
    assert parts == {"shared", "up", "down"}


def test_lora_sparsify_and_factorize_apply_to_shared_weights_and_deltas(tmp_path):
    pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
    shared_folder = shared("bert", tmp_path / "made").out
    lora = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32", lora={"r": 2})
    trained = every_family.run_stage(Finetune(), lora, shared_folder, "bert", tmp_path / "lora").out
    assert read_edits(trained) == read_edits(shared_folder)
    sparse = every_family.run_stage(
        Sparsify(), SparsifySettings(method="magnitude"), shared_folder, "bert", tmp_path / "sparse"
    )
    layer = harness.load_output_model(sparse).bert.encoder.layer[0].output.dense
    assert all(is_masked(m) for m in (layer.shared, layer.difference.down, layer.difference.up))
    pairs = every_family.run_stage(
        Factorize(),
        FactorizeSettings(method="svd", optimize_for="size", rank=6),
        shared_folder,
        "bert",
        tmp_path / "pairs",
    )
    first, second, _ = harness.load_output_model(pairs).bert.encoder.layer
    assert first.output.dense.shared is second.output.dense.shared
    assert first.output.dense.shared.rank == 6
    assert first.output.dense.rank == second.output.dense.rank == 4


def test_next_layer_owns_shared_weights_when_owner_is_dropped(tmp_path):
    shared_folder = shared("bert", tmp_path / "made").out
    original, _ = load_model(shared_folder)
    shorter = every_family.run_stage(
        DropLayers(), DropLayersSettings(layers=[1, 2]), shared_folder, "bert", tmp_path / "shorter"
    )
    moved_layer = harness.load_output_model(shorter).bert.encoder.layer[0].output.dense
    original_layer = original.bert.encoder.layer[1].output.dense
    assert torch.equal(moved_layer.shared.weight, original_layer.shared.weight)
    assert torch.equal(moved_layer.difference.up.weight, original_layer.difference.up.weight)


def test_quantized_shared_weights_are_shared_after_reload(tmp_path):
    shared_folder = shared("llama", tmp_path / "made").out
    codes = every_family.run_stage(
        Quantize(), QuantizeSettings(scheme="int4"), shared_folder, "llama", tmp_path / "codes"
    )
    first, second, _ = (layer.mlp.down_proj for layer in harness.load_output_model(codes).model.layers)
    assert first.shared is second.shared
    assert first.shared.matrix.scheme.name == "int4"


def test_shared_layers_cannot_be_pruned_or_shared_again_with_delta(tmp_path):
    shared_folder = shared("bert", tmp_path / "made").out
    with raises_code("shared-weights", InputError):
        every_family.run_stage(
            Prune(), PruneSettings(importance="magnitude"), shared_folder, "bert", tmp_path / "cut"
        )
    model, edits = load_model(shared_folder)
    num_edits = len(edits)
    _, notes = share_layers(model, edits, settings())
    assert set(message_codes(notes)) == {"already-shared"}
    assert len(edits) == num_edits
    reshared, _ = load_model(shared_folder)
    share_layers(
        reshared, [], ShareWeightsSettings()
    )  # without difference they become one, with the difference
    assert reshared.bert.encoder.layer[0].output.dense is reshared.bert.encoder.layer[1].output.dense
    pairs = every_family.run_stage(
        Factorize(), FactorizeSettings(method="svd", optimize_for="size", rank=4), three_layer_model("bert"),
        "bert", tmp_path / "pairs",
    ).out  # fmt: skip
    model, edits = load_model(pairs)
    _, notes = share_layers(model, edits, settings())
    assert notes[0].code == "already-factorized"
    with raises_setting_codes("greater_than_equal"):
        settings(0)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_shared_weights_are_not_taken_for_word_embedding(family, tmp_path):
    """So these call their word embedding, which `vocabulary` cuts and which must fit the config."""
    shared_ctx = shared(family, tmp_path / "shared")
    config = json.loads((shared_ctx.out / "config.json").read_text())
    assert check_file_consistency(shared_ctx.out, config)[0] == []
    model = load_model(shared_ctx.out)[0]
    inside = {n: p.clone() for n, p in model.named_parameters() if n.endswith(".shared.weight")}
    keep_vocabulary_rows(model, list(range(12)))
    assert len(model.get_input_embeddings().weight) == 12
    now = dict(model.named_parameters())
    shared_names = [name for name in inside if SharedLinear in map(type, _owners(model, name))]
    assert shared_names
    assert all(torch.equal(now[name], inside[name]) for name in shared_names)


def _owners(model, name):
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts))]
