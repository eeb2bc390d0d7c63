import contextlib

import pytest
import torch
from torch import nn

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.plan_layers import fake_quantize_activations, quantize_module
from smelt.compress.quantize.qat import (
    QatEmbedding,
    QatLinear,
    convert_qat,
    load_trainable,
    mark_trained,
    prepare_qat,
    with_original_weights,
)
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.artifact import Artifact, Manifest
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.quantization.layers import QuantizedEmbedding, layer_scheme
from smelt.quantization.schemes.registry import SCHEMES, default_options
from smelt.tasks.read_split import read_split
from tests.support import harness, schemes
from tests.support.models import tiny

SETTINGS = {"learning_rate": 5e-3, "batch_size": 8, "precision": "fp32", "num_evals": 0, "dropout": 0.0}


def artifact(folder, key, stage, parent, task):
    manifest = Manifest(
        key=key * 64, format="torch", task=task, stage=stage, settings={}, seed=0,
        parent=parent and parent * 64, versions={},
    )  # fmt: skip
    return Artifact(folder, manifest)


def quantized(folder, family, task, **settings):
    """Make a tiny model and quantize it; return both artifacts."""
    first = artifact(getattr(tiny, f"write_{family}")(folder / "model"), "a", "model", None, task)
    (folder / "quantized").mkdir()
    Quantize()(first, QuantizeSettings(**settings), context(folder / "quantized", task, {}))
    return first, artifact(folder / "quantized", "b", "quantize", "a", task)


def context(out, task, ancestors, data=None):
    return harness.make_context(out, task, data=data or {}, ancestors=ancestors)


def distance(folder, teacher):
    """How far a translator's next words are from the teacher's on the tiny sentences (mean KL, nats)."""
    model, tokenizer = load_model(folder)[0], load_tokenizer(folder)
    batch = tokenizer(tiny.SENTENCES, text_target=tiny.SENTENCES[4:] + tiny.SENTENCES[:4], padding=True)
    inputs = {name: torch.tensor(value) for name, value in batch.items()}
    with torch.no_grad():
        student_logits, teacher_logits = (
            m(**inputs).logits[inputs["labels"] >= 2].log_softmax(-1) for m in (model, teacher)
        )
    return float(nn.functional.kl_div(student_logits, teacher_logits, reduction="batchmean", log_target=True))


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    path = tiny.write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows=64)
    return {"train": read_split(str(path), "translation", Columns(), path.parent)}


def test_binary_translator_approaches_teacher_in_50_steps(tmp_path, translations):
    first, second = quantized(tmp_path, "marian", "translation", scheme="binary", group_size=32)
    ctx = context(tmp_path / "out", "translation", {"model": first, "quantize": second}, translations)
    alone = {"losses": {"logits": 1.0, "labels": 0.0}, "temperature": 1.0}
    Distill()(second, DistillSettings(max_steps=50, **(SETTINGS | alone)), ctx)
    teacher, _ = load_model(first.path)
    assert distance(tmp_path / "out", teacher) < 0.8 * distance(second.path, teacher)
    assert ctx.details["latent_weights"] == "model"
    assert 0 < ctx.details["codes_changed"] < 0.7
    same = [(folder / "structure.json").read_bytes() for folder in (second.path, tmp_path / "out")]
    assert same[0] == same[1]
    before, after = (load_model(f)[0].state_dict() for f in (second.path, tmp_path / "out"))
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }
    assert after["lm_head.matrix.codes"].data_ptr() == after["model.shared.matrix.codes"].data_ptr()
    pad = load_model(second.path)[0].config.pad_token_id
    row = load_model(tmp_path / "out")[0].model.shared(torch.tensor([pad]))
    assert row.eq(0).all()  # Marian's decoder starts from a zero embedding, also after training


def test_convert_without_training_reproduces_quantized_weights(tmp_path):
    """From the float weights the very codes are decided again."""
    first, second = quantized(tmp_path, "marian", "translation", scheme="binary", group_size=32)
    ctx = context(tmp_path / "out", "translation", {"model": first, "quantize": second})
    model, _ = load_trainable(second, ctx)
    latents = [m for m in model.modules() if isinstance(m, QatLinear | QatEmbedding)]
    assert len(latents) == 2 * 6 + 2 * 10 + 1 + 3
    assert model.lm_head.weight is model.model.shared.weight
    assert {n for n, p in model.named_parameters() if not p.requires_grad and "position" not in n} == set()
    expected, _ = load_model(first.path)
    assert model.model.encoder.layers[0].fc1.weight.equal(expected.model.encoder.layers[0].fc1.weight)
    convert_qat(model, ctx)
    assert ctx.details["codes_changed"] == 0
    before = load_model(second.path)[0].state_dict()
    after = model.state_dict()
    assert all(after[name].equal(before[name]) for name in before)


def test_qat_layers_compute_same_outputs_as_quantized_layers(tmp_path):
    _, second = quantized(
        tmp_path,
        "marian",
        "translation",
        scheme="binary",
        group_size=32,
        accuracy_level=0,
        embedding_scheme="int4",
    )
    model, _ = load_model(second.path)
    ids = torch.randint(1, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
        prepare_qat(model, load_model(tmp_path / "model")[0])
        got = model(input_ids=ids, decoder_input_ids=ids).logits
    assert got.allclose(expected, atol=1e-4)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_int8_qat_layers_round_activations_as_runtime(scheme):
    torch.manual_seed(0)
    float_layer = nn.Linear(24, 8)
    quantized = schemes.with_activation_range(float_layer, scheme, largest=6.0)
    x = 3 * torch.randn(5, 24)
    latent = QatLinear(quantized, nn.Parameter(float_layer.weight.detach().clone()))
    expected = quantized(x)
    unrounded = nn.functional.linear(x, quantized.matrix.dequantize(), quantized.bias)
    assert (expected - unrounded).abs().max() > 5e-3, "rounding activations changes nothing here"
    assert latent(x).allclose(expected, atol=1e-5)
    leaf = x.clone().requires_grad_(True)
    latent(leaf).sum().backward()
    assert leaf.grad.allclose(quantized.matrix.dequantize().sum(dim=0).expand(5, -1), atol=1e-5)
    assert latent.weight.grad.allclose(
        fake_quantize_activations(x, quantized.matrix).sum(dim=0).expand(8, -1), atol=1e-4
    )


def sym_quantizer(x, num_bits):
    """SymQuantizer of BinaryBERT's reference code, by row, without its clipping."""
    steps = (2 ** (num_bits - 1) - 1) / x.abs().max(dim=-1, keepdim=True)[0]
    return torch.round(x * steps).div(steps)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ("int4", 8),
        ("int2", 8),
        ("kmeans4", 8),
        *((s, bits) for s in ("ternary", "binary") for bits in (8, 4)),
    ],
)
def test_group_qat_layers_round_activations_as_binarybert_and_runtime(scheme, bits):
    """A row of one group: the blocks of the runtime are the rows of the reference."""
    torch.manual_seed(0)
    float_layer = nn.Linear(128, 8)
    options = default_options(SCHEMES[scheme]) | {"group_size": 128}
    quantized = quantize_module(
        float_layer, scheme, options if bits == 8 else options | {"activation_bits": 4}
    )
    x = 3 * torch.randn(5, 128)
    latent = QatLinear(quantized, nn.Parameter(float_layer.weight.detach().clone()))
    rounded = sym_quantizer(x, bits)
    assert latent(x).allclose(
        nn.functional.linear(rounded, quantized.matrix.dequantize(), latent.bias), atol=1e-5
    )
    assert latent(x).allclose(quantized(x), atol=1e-5)
    leaf = x.clone().requires_grad_(True)
    latent(leaf).sum().backward()
    assert leaf.grad.allclose(quantized.matrix.dequantize().sum(dim=0).expand(5, -1), atol=1e-5)
    assert latent.weight.grad.allclose(rounded.sum(dim=0).expand(8, -1), atol=1e-4)


def test_mixed_model_trains_with_the_rounding_of_each_layer(tmp_path):
    """int8 embeddings and output layer beside binary layers: all of them as they are deployed."""
    _, second = quantized(
        tmp_path, "marian", "translation", scheme="binary", group_size=32, activation_bits=4
    )
    model, _ = load_model(second.path)
    kinds = {layer_scheme(module) for module in model.modules()} - {None}
    assert kinds == {"binary", "int8-dynamic"}
    ids = torch.randint(1, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
        prepare_qat(model, load_model(tmp_path / "model")[0])
        got = model(input_ids=ids, decoder_input_ids=ids).logits
    assert got.allclose(expected, atol=1e-4)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static", "int4", "binary"])
def test_qat_layers_compute_on_device_of_weights(scheme):
    """The meta device stands for a GPU: the quantized layers are no submodules, which `to` moves."""
    float_layer, x = nn.Linear(64, 8), torch.empty(5, 64, device="meta")
    quantized = quantize_module(float_layer, scheme)
    table = QuantizedEmbedding(64, None, quantize_module(nn.Linear(64, 8), scheme).matrix)
    product = QatLinear(quantized, nn.Parameter(float_layer.weight.detach()))
    lookup = QatEmbedding(table, nn.Parameter(torch.zeros(8, 64)))
    model = nn.ModuleList([product, lookup]).to("meta")
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    for context_of in (contextlib.nullcontext(), with_original_weights(model)):
        with context_of:
            assert product(x).device == lookup(ids).device == x.device


@pytest.mark.parametrize("alone", [True, False, "tensor"])
def test_looked_up_rows_are_quantized_with_full_table(alone):
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    weight[5] *= 10  # which decides the one scale of a whole matrix, and is not looked up
    if alone == "tensor":
        matrix = schemes.rounded_matrix("int8-dynamic", weight, granularity="tensor")
    else:
        matrix = (
            schemes.rounded_matrix("int8-dynamic", weight) if alone else schemes.per_tensor(weight).matrix
        )
    assert matrix.is_row_independent() == (alone is True)
    latent = QatEmbedding(QuantizedEmbedding(32, None, matrix), nn.Parameter(weight.clone()))
    ids = torch.tensor([[0, 2], [2, 1]])
    assert latent(ids).equal(matrix.dequantize()[ids])
    latent(ids).sum().backward()
    assert latent.weight.grad.equal(torch.tensor([1.0, 1, 2, 0, 0, 0])[:, None].expand(6, 32))


def test_training_without_parent_starts_from_dequantized_weights(tmp_path):
    _, second = quantized(tmp_path, "bert", "text-classification", scheme="binary", group_size=32)
    ctx = context(tmp_path / "out", "text-classification", {})
    model, _ = load_trainable(second, ctx)
    assert ctx.details["latent_weights"] == "codes"
    stored, _ = load_model(second.path)
    assert model.bert.pooler.dense.weight.equal(stored.bert.pooler.dense.matrix.dequantize())


def test_diverged_training_restores_initial_model_exactly(tmp_path, translations):
    """GPTQ's integers are not those nearest to the float weights, from which the training goes on."""
    first = artifact(tiny.write_marian(tmp_path / "model"), "a", "model", None, "translation")
    (tmp_path / "quantized").mkdir()
    settings = QuantizeSettings(scheme="int2", method="gptq", group_size=32, calibration_samples=16)
    Quantize()(first, settings, context(tmp_path / "quantized", "translation", {}, translations))
    second = artifact(tmp_path / "quantized", "b", "quantize", "a", "translation")
    data = {**translations, "validation": translations["train"]}
    ctx = context(tmp_path / "trained", "translation", {"model": first, "quantized": second}, data)
    chosen = SETTINGS | {"learning_rate": 0.5, "num_evals": 2, "max_steps": 4, "label_smoothing_factor": 0.0}
    Finetune()(second, FinetuneSettings(**chosen), ctx)
    came, trained = (
        load_model(folder)[0].eval() for folder in (tmp_path / "quantized", tmp_path / "trained")
    )
    assert ctx.details["training"]["kept_step"] == 0
    assert ctx.details["codes_changed"] == 0
    for name, value in came.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name


def test_initial_model_is_evaluated_with_original_integers(tmp_path, translations):
    first = artifact(tiny.write_marian(tmp_path / "model"), "a", "model", None, "translation")
    (tmp_path / "quantized").mkdir()
    settings = QuantizeSettings(scheme="int2", method="gptq", group_size=32, calibration_samples=16)
    Quantize()(first, settings, context(tmp_path / "quantized", "translation", {}, translations))
    second = artifact(tmp_path / "quantized", "b", "quantize", "a", "translation")
    model, _ = load_trainable(second, context(tmp_path / "out", "translation", {"model": first}))
    layer = next(m for m in model.modules() if isinstance(m, QatLinear))
    x = torch.randn(3, layer.in_features)
    rounded = fake_quantize_activations(x, layer.quantized.matrix)
    stored_output = nn.functional.linear(rounded, layer.quantized.matrix.dequantize(), layer.bias)
    assert not torch.equal(layer(x), stored_output)  # those nearest to the float weights
    with with_original_weights(model):
        assert torch.equal(layer(x), stored_output)
    mark_trained(model)
    with with_original_weights(model):
        assert not torch.equal(layer(x), stored_output)


def test_clipped_scales_are_a_provided_property():
    assert Quantize.provides(QuantizeSettings(scheme="int4", clip="mse")) == {"codes"}
    assert Quantize.provides(QuantizeSettings(scheme="int4")) == frozenset()
