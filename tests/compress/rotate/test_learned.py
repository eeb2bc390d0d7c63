"""Learned rotations: updates as in the papers, the same float model, and a closer quantized model."""

import numpy as np
import pytest
import torch

from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.rotate.learned import LearnedMatrix, RoundingNoise
from smelt.compress.rotate.rotations import Rotation, random_hadamard, random_rotation_with_mean
from smelt.compress.rotate.settings import LearnedRotations, RotateSettings
from smelt.compress.rotate.stage import Rotate
from smelt.core.messages import message_codes
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.quantization.schemes.registry import SCHEMES, can_learn_ranges
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import every_family, tiny

LEARNED = {"learned": {"scheme": "int4", "group_size": 16, "iterations": 20}}


def cayley_step(x, gradient, step):
    """Return the step from `x` along the Cayley transform of Li et al. 2020, arXiv:2002.01113, section 4."""
    m = -gradient
    w_hat = m @ x.T - 0.5 * x @ (x.T @ m @ x.T)
    w = w_hat - w_hat.T
    identity = np.eye(len(x))
    return np.linalg.inv(identity - step / 2 * w) @ (identity + step / 2 * w) @ x


@pytest.mark.quick
def test_gradient_step_equals_cayley_step_of_paper_in_float64():
    rng = np.random.default_rng(0)
    start, factors = random_hadamard(12, rng), torch.from_numpy(rng.standard_normal((12, 12)))
    learned = LearnedMatrix(Rotation(start))
    optimizer = torch.optim.SGD(learned.parameters(), lr=0.05)
    (learned().sin() * factors).sum().backward()
    optimizer.step()
    gradient = (start.cos() * factors).numpy()
    # a skew-symmetric matrix has each parameter twice, so a step is twice as long
    np.testing.assert_allclose(learned().detach(), cayley_step(start.numpy(), gradient, 0.1), atol=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("keeps_mean", [False, True])
def test_learned_matrix_is_orthogonal_after_updates(keeps_mean):
    rng = np.random.default_rng(0)
    start = random_rotation_with_mean(24, rng) if keeps_mean else random_hadamard(24, rng)
    learned, target = LearnedMatrix(Rotation(start, keeps_mean)), torch.from_numpy(rng.random((24, 24)))
    torch.testing.assert_close(learned(), start, rtol=0, atol=1e-12)
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (learned() - target).square().sum().backward()
        optimizer.step()
    matrix = learned().detach()
    assert float((matrix - start).abs().max()) > 0.1
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(24).double(), rtol=0, atol=1e-12)
    if keeps_mean:
        ones = torch.ones(24).double()
        torch.testing.assert_close(ones @ matrix, ones, rtol=0, atol=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", [name for name, known in SCHEMES.items() if can_learn_ranges(known)])
def test_noise_is_a_step_of_scale_with_gradient_for_range(scheme, symmetric):
    torch.manual_seed(0)
    linear, factors = torch.nn.Linear(80, 3, bias=False), torch.randn(3, 80)
    options = {"group_size": 32, "symmetric": symmetric, "accuracy_level": 0}
    with torch.no_grad():
        linear.weight[1, :32] = 0
    layer = PlannedLayer(linear, "layer", scheme, options, multiplies=True)
    values = RoundingNoise(torch.Generator().manual_seed(1))(linear.weight, layer)
    (values * factors).sum().backward()

    w, f, noise = (x.detach().double().numpy() for x in (linear.weight, factors, values - linear.weight))
    expected, ratios, bits = f.copy(), [], SCHEMES[scheme].bits
    for row in range(3):
        for group in (slice(0, 32), slice(32, 64), slice(64, 80)):
            x = w[row, group]
            low, high = min(x.min(), 0), max(x.max(), 0)
            span = np.abs(x).max() if symmetric else high - low
            if not span:
                assert not noise[row, group].any()
                continue
            step = span / (2 ** (bits - 1) if symmetric else 2**bits - 1)
            ratios.extend(noise[row, group] / step)
            slope = (f[row, group] * noise[row, group]).sum() / span  # of the noise, by the span
            ends = np.sign(x) * (np.abs(x) == span) if symmetric else 1.0 * (x == high) - (x == low)
            expected[row, group] += slope * ends
    np.testing.assert_allclose(linear.weight.grad.numpy(), expected, atol=1e-4)
    assert max(map(abs, ratios)) < 0.502  # scales are stored as float16
    assert np.var(ratios) == pytest.approx(1 / 12, rel=0.15)


@pytest.mark.parametrize(("family", "targets"), [
    ("llama", ["width", "heads"]), ("gpt2", ["width", "heads"]), ("t5", ["width"]), ("bert", ["heads"]),
])  # fmt: skip
def test_learned_rotations_keep_outputs_and_reduce_divergence(family, targets, tmp_path):
    source, models = every_family.model_with_layers(family, 2), {}
    for name, learned in (("hadamard", {}), ("learned", LEARNED)):
        settings = RotateSettings(targets=targets, **learned)
        ctx = every_family.run_stage(Rotate(), settings, source, family, tmp_path / name)
        models[name] = load_model(ctx.out)[0]
    expected = harness.logits(load_model(source)[0])
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(harness.logits(models["learned"]), expected, rtol=0, atol=atol)
    assert set(message_codes(ctx.warnings)) <= {"few-held-back-samples"}
    assert 0 < ctx.details["divergence_after"] < ctx.details["divergence_before"]
    weights, initial = (models[name].state_dict() for name in ("learned", "hadamard"))
    assert not all(torch.allclose(weights[name], initial[name], atol=1e-4) for name in weights)


def test_learned_rotations_are_equal_in_every_run(tmp_path):
    source, settings = every_family.model_with_layers("bert", 2), RotateSettings(targets=["heads"], **LEARNED)
    first, second = (
        load_model(every_family.run_stage(Rotate(), settings, source, "bert", tmp_path / name).out)[0]
        for name in ("first", "second")
    )
    weights, equal_weights = first.state_dict(), second.state_dict()
    assert all(torch.equal(weights[name], equal_weights[name]) for name in weights)


def test_rotations_that_are_not_better_are_not_used(tmp_path):
    source = every_family.model_with_layers("llama", 2)
    plain, learned = (
        every_family.run_stage(Rotate(), RotateSettings(**settings), source, "llama", tmp_path / name)
        for name, settings in (
            ("plain", {}), ("learned", {"learned": {"learning_rate": 100.0, "iterations": 1}}),
        )
    )  # fmt: skip
    assert "rotations-not-better" in message_codes(learned.warnings)
    weights, initial = (load_model(ctx.out)[0].state_dict() for ctx in (learned, plain))
    assert all(torch.equal(weights[name], initial[name]) for name in initial)


@pytest.mark.parametrize(("count", "codes"), [
    (9, ["few-held-back-samples"]), (10, ["few-held-back-samples"]), (80, []),
])  # fmt: skip
def test_rotations_judged_on_few_samples_have_a_warning(count, codes, tmp_path):
    source, settings = every_family.model_with_layers("bert", 2), RotateSettings(targets=["heads"], **LEARNED)
    file = tiny.write_labeled(tmp_path / "rows.jsonl", count)
    data = read_split(str(file), "text-classification", Columns(), tmp_path)
    ctx = harness.run_stage(Rotate(), settings, source, tmp_path / "out", "text-classification", data)
    assert message_codes(ctx.warnings) == codes
    assert ctx.details["calibration"].get("held_back", 0) == count // 10


@pytest.mark.quick
def test_learned_rotations_need_calibration_data():
    settings = RotateSettings(learned=LearnedRotations())
    assert Rotate.needs_with(settings, {"calibration"}) == {"calibration"}
    assert Rotate.needs_with(settings) == {"train"}
    assert Rotate.needs_with(RotateSettings()) == frozenset()


@pytest.mark.quick
@pytest.mark.parametrize(("learned", "code"), [
    ({"scheme": "int8-dynamic"}, "literal_error"), ({"scheme": "int4", "group_size": 7}, "literal_error"),
    ({"scheme": "int2", "symmetric": "positive"}, "wrong-value"),
    ({"scheme": "int3", "calibrate": 1}, "extra_forbidden"),
])  # fmt: skip
def test_learned_rotations_refuse_other_schemes_and_options(learned, code):
    with raises_setting_codes(code):
        RotateSettings(learned=learned)


@pytest.mark.quick
def test_learned_rotations_do_not_start_from_principal_axes():
    with raises_setting_codes("settings-conflict"):
        RotateSettings(method="pca", learned=LearnedRotations())


@pytest.mark.quick
def test_settings_have_options_of_learned_schemes_alone():
    """Others had no value that any of these schemes accepts."""
    learned = [scheme for scheme in SCHEMES.values() if can_learn_ranges(scheme)]
    options = {option.name for scheme in learned for option in scheme.option_specs}
    fields = set(LearnedRotations.model_fields)
    assert fields - {"scheme", "iterations", "learning_rate"} == options
    with raises_setting_codes("extra_forbidden"):
        RotateSettings(learned={"granularity": "channel"})


@pytest.mark.quick
def test_plan_shows_default_scheme_of_learned_rotations():
    assert RotateSettings(learned={}).to_plan() == {"learned": {"scheme": "int4"}}
    options = {"group_size": 32, "scheme": "int3"}
    assert RotateSettings(learned=options, targets=["heads"]).to_plan() == {
        "targets": ["heads"], "learned": options,
    }  # fmt: skip
    assert RotateSettings().to_plan() == {}


@pytest.mark.quick
def test_report_of_learned_rotations_shows_options_of_scheme():
    assert LearnedRotations(scheme="int3", group_size=32).to_report() == {
        "scheme": "int3", "group_size": 32, "symmetric": True, "accuracy_level": 4, "iterations": 100,
        "learning_rate": 1e-2,
    }  # fmt: skip
