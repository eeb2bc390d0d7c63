"""AutoRound against its formulas in float64, and its blocks against the same blocks of two whole models."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from smelt.calibration.samples import load_calibration_samples
from smelt.compress.quantize import autoround as module
from smelt.compress.quantize.autoround import LearnedRounding, sign_descent
from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from smelt.quantization.schemes.registry import SCHEMES, can_learn_ranges
from smelt.tasks.samples import IGNORE_INDEX
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, tiny

LEARNED = [scheme for scheme in SCHEMES.values() if can_learn_ranges(scheme)]
FORMS = [(s, symmetric) for s in LEARNED for symmetric in (True, False)]
IDS = [f"{s.name}-{'symmetric' if symmetric else 'zeros'}" for s, symmetric in FORMS]
SIZE = 16


def drawn_rounding(scheme, symmetric, keep_zeros=False):
    """A matrix whose last group is padded, and one group is zero."""
    torch.manual_seed(1)
    weight = torch.randn(3, 40)
    weight[1, :SIZE] = 0
    options = {"group_size": SIZE, "symmetric": symmetric, "accuracy_level": 0}
    return LearnedRounding(weight, scheme, options, keep_zeros), weight, options


def expected_values(groups, v, a, b, bits, symmetric):
    """Return Q and its gradients by the formulas of the published quant_tensor_sym and _asym, float64.

    The result is Q, dQ/dV, and for each weight dQ/da and dQ/db, whose sums over a group count.
    """
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    wmin, wmax, max_code, half = low * a, high * b, 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        takes_high = wmax > -wmin
        exact = np.where(takes_high, wmax, wmin) / -half
        slopes = np.where(takes_high, 0, low) / -half, np.where(takes_high, high, 0) / -half
    else:
        exact, slopes = (wmax - wmin) / max_code, (-low / max_code, high / max_code)
    s = exact.astype(np.float16).astype(np.float64)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(s == 0, 0, groups / s)
        zero = np.full_like(s, half) if symmetric else np.where(s == 0, 0, np.round(-wmin[..., None] / s))
        dzero_ds = 0 if symmetric else np.where(s == 0, 0, wmin[..., None] / s**2)
        dzero_da = 0 if symmetric else np.where(s == 0, 0, -low[..., None] / s)
    codes = np.round(x + v) + zero
    inside = (codes >= 0) & (codes <= max_code)
    steps = np.clip(codes, 0, max_code) - zero
    dq_ds = steps - inside * x
    dq_dzero = -s * ~inside
    of_ends = [(dq_ds + dq_dzero * dzero_ds) * slope[..., None] for slope in slopes]
    return s * steps, s * inside, of_ends[0] + dq_dzero * dzero_da, of_ends[1]


@pytest.mark.parametrize(("scheme", "symmetric"), FORMS, ids=IDS)
def test_values_and_gradients_equal_published_formulas_in_float64(scheme, symmetric):
    rounding, weight, _ = drawn_rounding(scheme, symmetric)
    v, a, b = rounding.parameters
    with torch.no_grad():
        v += torch.rand_like(v) - 0.5
        a -= 0.5 * torch.rand_like(a)
        b -= 0.5 * torch.rand_like(b)
    factors = torch.randn(3, 40)
    values = rounding.values()
    gradients = torch.autograd.grad((values * factors).sum(), rounding.parameters)

    def grouped(x):
        return np.pad(x.detach().double().numpy(), ((0, 0), (0, 8))).reshape(3, 3, SIZE)

    v64, a64, b64 = (p.detach().double().numpy() for p in (v, a, b))
    q, of_v, of_a, of_b = expected_values(grouped(weight), v64, a64, b64, scheme.bits, symmetric)
    np.testing.assert_allclose(values.detach().numpy(), q.reshape(3, -1)[:, :40], atol=1e-6)
    c = grouped(factors)
    for gradient, expected in zip(gradients, (c * of_v, (c * of_a).sum(-1), (c * of_b).sum(-1)), strict=True):
        # the slopes of scales have the rounding of these to float16
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=2e-3, atol=1e-3)
    assert (of_v == 0).any() and (of_a != 0).any() and (of_b != 0).any()  # noqa: PT018


@pytest.mark.parametrize(("scheme", "symmetric"), FORMS, ids=IDS)
def test_rounding_without_updates_equals_nearest(scheme, symmetric):
    rounding, weight, options = drawn_rounding(scheme, symmetric)
    codes, nearest = rounding.codes(), round_to_nearest(weight, scheme, options)
    assert torch.equal(codes.q_weight, nearest.q_weight)
    assert codes.qparams.keys() == nearest.qparams.keys()
    assert all(torch.equal(codes.qparams[name], nearest.qparams[name]) for name in nearest.qparams)


@pytest.mark.parametrize(("scheme", "symmetric"), FORMS, ids=IDS)
def test_stored_codes_have_learned_values(scheme, symmetric):
    rounding, weight, options = drawn_rounding(scheme, symmetric)
    with torch.no_grad():
        for parameter in rounding.parameters:
            parameter.sub_(0.4 * torch.rand_like(parameter))
    codes = rounding.codes()
    stored = scheme.dequantize(codes.q_weight, codes.qparams, options).flatten(1)[:, :40]
    torch.testing.assert_close(stored, rounding.values().detach(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(codes.q_weight, round_to_nearest(weight, scheme, options).q_weight)


def test_descent_keeps_iteration_with_least_loss():
    """Each update moves by (1 - i / n) / n against the sign; a and b end at 1."""
    rounding = drawn_rounding(SCHEMES["int4"], True)[0]
    factors, losses = torch.randn(3, 40), [3.0, 2.0, 1.0, 2.5]
    seen = []

    def loss_of(values):
        seen.append([parameter.detach().clone() for parameter in rounding.parameters])
        return losses[len(seen) - 1], [factors]

    assert sign_descent([rounding], loss_of, 4) == losses
    assert len(seen) == 4
    assert all(torch.equal(p, q) for p, q in zip(rounding.parameters, seen[2], strict=True))
    assert not bool(seen[0][0].any())
    moves = [(later[0] - earlier[0]).abs().max() for earlier, later in pairwise(seen)]
    np.testing.assert_allclose(moves, [1 / 4, 3 / 16, 2 / 16], rtol=1e-6)
    of_first = torch.sign(seen[1][0]).flatten(1)[:, :40]
    scales = round_to_nearest(rounding.weight, SCHEMES["int4"], {"group_size": SIZE, "symmetric": True})
    signs = torch.sign(factors) * torch.sign(scales.qparams["scales"].repeat_interleave(SIZE, 1)[:, :40])
    moved = of_first != 0
    assert moved.float().mean() > 0.8  # not where the group is zero or a code is clipped
    assert torch.equal(of_first[moved], -signs[moved])
    assert all(float(shrink.detach().max()) <= 1 for shrink in rounding.parameters[1:])


def test_zeros_are_unchanged_only_with_keep_zeros():
    torch.manual_seed(0)
    weight = torch.randn(4, 32) * (torch.rand(4, 32) < 0.5)
    options = {"group_size": SIZE, "symmetric": False, "accuracy_level": 0}
    for keep_zeros in (True, False):
        rounding = LearnedRounding(weight, SCHEMES["int2"], options, keep_zeros)
        with torch.no_grad():
            rounding.parameters[0].add_(0.51)
        assert bool((rounding.values()[weight == 0] == 0).all()) == keep_zeros


SETTINGS = {
    "scheme": "int2",
    "method": "autoround",
    "group_size": 32,
    "iterations": 15,
    "calibration_samples": 24,
}


def run(family, out, **settings):
    source = every_family.model_with_layers(family, 2)
    out.mkdir()
    task = every_family.FAMILIES[family].tasks[0]
    if task == "language-modeling":
        file = every_family.causal.write_lines(out.with_suffix(".txt"), 12)
    else:
        write = tiny.write_labeled if task == "text-classification" else tiny.write_pairs
        file = write(out.with_suffix(".jsonl"), rows=40)
    data = every_family.read_split(str(file), task, every_family.Columns(), out)
    return source, harness.run_stage(
        Quantize(), QuantizeSettings(**SETTINGS | settings), source, out, task, data
    )


def block_outputs(model, path, batches, is_source):
    """Return the outputs of a block of a whole model for all tokens, float64 [tokens, D]."""
    outputs = []

    def keep(_, inputs, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        mask = batch["attention_mask"].bool() if is_source else batch["labels"] != IGNORE_INDEX
        outputs.append(states[mask].double())

    handle = model.get_submodule(path).register_forward_hook(keep)
    for batch in batches:
        with torch.no_grad():
            model(**{name: value for name, value in batch.items() if name != "labels"})
    handle.remove()
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["marian", "llama", "bert"])
def test_blocks_are_tuned_for_float_outputs_on_quantized_inputs(family, tmp_path):
    """The reported error is that of the last block on samples held back, behind the quantized blocks."""
    source, ctx = run(family, tmp_path / "out")
    errors = ctx.details["autoround_error"]
    plain, quantized = load_model(source)[0], harness.load_output_model(ctx)
    nearest = load_model(source)[0]  # its last block rounded to nearest, what is before it as in the result
    blocks = [block.module_path for block in blocks_of(plain)]
    assert set(errors) >= set(blocks)
    assert all(error <= 1 for error in errors.values())
    assert np.mean([errors[path] for path in blocks]) < 0.9
    last, learned = blocks[-1], load_model(source)[0]
    for name, layer in quantized.named_modules():
        if isinstance(getattr(layer, "matrix", None), torch.nn.Module) and name.startswith(tuple(blocks)):
            with torch.no_grad():
                learned.get_submodule(name).weight.copy_(values := layer.matrix.dequantize())
                if name.startswith(last):
                    weight, matrix = plain.get_submodule(name).weight.detach(), layer.matrix
                    codes = round_to_nearest(weight, matrix.scheme, matrix.options)
                    values = matrix.scheme.dequantize(*codes, matrix.options).flatten(1)[:, : weight.shape[1]]
                nearest.get_submodule(name).weight.copy_(values)
    samples = load_calibration_samples(
        plain, tiny.as_artifact(source, ctx.task), 24, ctx, "quantize", padded=True, held_back=True
    )
    batches = samples.held_back.batches
    target, *others = (
        block_outputs(model, last, batches, family != "marian") for model in (plain, learned, nearest)
    )
    squared = [float((output - target).square().sum()) for output in others]
    assert errors[last] == pytest.approx(squared[0] / squared[1], rel=1e-2)


def test_block_without_gain_is_rounded_to_nearest(tmp_path, monkeypatch):
    monkeypatch.setattr(module.BlockLoss, "on_other_samples", lambda *_: 1.5)
    source, ctx = run("bert", tmp_path / "out")
    model, plain = harness.load_output_model(ctx), load_model(source)[0]
    assert set(ctx.details["autoround_error"].values()) >= {1.0}
    for block in blocks_of(plain):
        for name in (f"{block.module_path}.{path}" for path in ("attention.self.query", "output.dense")):
            matrix = model.get_submodule(name).matrix
            codes = round_to_nearest(plain.get_submodule(name).weight.detach(), matrix.scheme, matrix.options)
            assert torch.equal(matrix.unpack().q_weight, codes.q_weight)


def test_layers_outside_of_blocks_are_tuned_and_tied_ones_are_not(tmp_path):
    for family, is_tuned in (("llama", True), ("gpt2", False)):
        source, ctx = run(family, tmp_path / family, embedding_scheme="int2", iterations=30)
        assert ("lm_head" in ctx.details["autoround_error"]) == is_tuned
        matrix = harness.load_output_model(ctx).get_output_embeddings().matrix
        weight = load_model(source)[0].get_output_embeddings().weight.detach()
        nearest = round_to_nearest(weight, matrix.scheme, matrix.options)
        assert torch.equal(matrix.unpack().q_weight, nearest.q_weight) != is_tuned
        if is_tuned:
            assert ctx.details["autoround_error"]["lm_head"] < 1


def test_same_seed_gives_same_weights(tmp_path):
    models = [run("bert", tmp_path / name, iterations=4)[1] for name in ("a", "b")]
    first, second = (dict(harness.load_output_model(ctx).state_dict()) for ctx in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_zeros_of_sparse_model_are_unchanged(tmp_path):
    pattern = SparsifySettings(method="magnitude", pattern="2:4")
    sparse = every_family.run_stage(
        Sparsify(), pattern, every_family.model_with_layers("bert", 1), "bert", tmp_path / "s"
    )
    before = harness.load_output_model(sparse)
    settings = QuantizeSettings(**SETTINGS | {"iterations": 8})
    ctx = every_family.run_stage(Quantize(), settings, sparse.out, "bert", tmp_path / "out")
    for name in sparse.details["sparsity_by_layer"]:
        values = harness.load_output_model(ctx).get_submodule(name).matrix.dequantized()
        assert not bool(values[before.get_submodule(name).weight == 0].any())


def test_non_finite_outputs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module.BlockLoss, "on_other_samples", lambda *_: float("nan"))
    with raises_code("non-finite-activations"):
        run("bert", tmp_path / "out", iterations=1)


def test_settings_that_do_not_apply_are_refused():
    assert QuantizeSettings(scheme="int4", method="autoround").needs_calibration
    assert QuantizeSettings(scheme="int4", method="autoround").to_report()["iterations"] == 200
    assert "iterations" not in QuantizeSettings(scheme="int4", method="gptq").to_report()
    with raises_setting_codes("unused-setting"):
        QuantizeSettings(scheme="int4", method="gptq", iterations=100)
    for refused in (
        {"clip": "mse"},
        {"mixed_precision": {"target_bits": 4.5}},
        {"low_rank_correction": {"rank": 2}},
        *({"scheme": name} for name, scheme in SCHEMES.items() if scheme not in LEARNED),
    ):
        scheme = {} if "mixed_precision" in refused else {"scheme": "int4"}
        with raises_setting_codes("settings-conflict"):
            QuantizeSettings(**{"method": "autoround"} | scheme | refused)
