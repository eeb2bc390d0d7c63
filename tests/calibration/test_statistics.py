"""Statistics of inputs against the same sums written out in numpy."""

import numpy as np
import pytest
import torch

from smelt.calibration import statistics
from smelt.calibration.samples import CalibrationSamples, observe_inputs
from smelt.calibration.statistics import collect_statistics, empty_statistics, warn_of_few_tokens
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from tests.support import harness
from tests.support.models import every_family


@pytest.fixture(scope="module")
def model():
    return load_model(every_family.model_with_layers("bert", 2))[0]


@pytest.fixture(scope="module")
def rows():
    draw = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(5, 20, size, generator=draw)} for size in ((2, 9), (3, 7))]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return CalibrationSamples("made", batches, 5, 39)


@pytest.mark.parametrize(("fed", "expected"), [
    ([(320, 64), (1280, 256)], ""), ([(0, 64)], ""),  # reported as a layer that no sample reaches
    ([(5, 64), (1280, 256)], ""),  # one vector of each text
    ([(319, 64)], "319 64 5.0"), ([(1279, 256), (20, 64), (319, 64)], "20 64 0.3"),
    ([(5, 1024), (1279, 256)], "900 1,024 0.9"),
])  # fmt: skip
def test_layer_with_few_tokens_per_input_is_reported(fed, expected, tmp_path):
    ctx = harness.make_context(tmp_path / "out")
    warn_of_few_tokens(fed, CalibrationSamples("rows.jsonl", [], 5, 900), ctx)
    assert message_codes(ctx.warnings) == ["few-calibration-tokens"] * bool(expected)
    assert {*expected.split()} <= {*" ".join(w.message for w in ctx.warnings).split()}


def layers_of(model):
    return {
        "fc2": [model.bert.encoder.layer[0].output.dense],
        "q": [model.bert.encoder.layer[1].attention.self.query],
    }


def inputs_of(model, rows, layers, tmp_path):
    inputs = {}
    observe_inputs(
        model,
        rows,
        layers,
        lambda k, x: inputs.setdefault(k, []).append(x.numpy().copy()),
        harness.make_context(tmp_path),
    )
    return {key: np.concatenate(parts).astype(np.float64) for key, parts in inputs.items()}


@pytest.mark.parametrize("limit", [2**30, 0])
def test_statistics_equal_the_formulas(limit, model, rows, tmp_path):
    layers = layers_of(model)
    expected = inputs_of(model, rows, layers, tmp_path / "out")
    with collect_statistics(
        model, rows, layers, harness.make_context(tmp_path / "out"), limit_bytes=limit
    ) as statistics:
        files = len(list(tmp_path.rglob("*.moment")))
        assert files == (0 if limit else 2)
        for key, x in expected.items():
            entry = statistics[key]
            assert (entry.tokens, entry.width) == x.shape == (39, x.shape[1])
            np.testing.assert_allclose(entry.second_moment, x.T @ x, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                entry.centered_second_moment(), np.cov(x.T, bias=True) * len(x), rtol=1e-4, atol=1e-4
            )
            np.testing.assert_allclose(entry.sums, x.sum(0), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(entry.magnitudes, abs(x).sum(0), rtol=1e-6)
            np.testing.assert_allclose(entry.l2_norms, np.linalg.norm(x, axis=0), rtol=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@torch.no_grad()
def test_padded_opt_batch_has_the_statistics_of_single_texts(tmp_path):
    """Its blocks flatten their states to [B L, K] before fc1 and give them their shape again behind fc2."""
    model, _ = load_model(every_family.model_with_layers("opt", 2))
    ids = torch.randint(5, 20, (3, 8), generator=torch.Generator().manual_seed(3))
    sizes = (8, 5, 2)
    mask = (torch.arange(8)[None] < torch.tensor(sizes)[:, None]).long()
    texts = [{"input_ids": ids[n : n + 1, :size]} for n, size in enumerate(sizes)]
    block = model.model.decoder.layers[1]
    layers = {"q": [block.self_attn.q_proj], "fc1": [block.fc1], "fc2": [block.fc2]}
    shapes = set()
    block.fc2.register_forward_pre_hook(lambda m, x: shapes.add(tuple(x[0].shape)))
    padded = CalibrationSamples("made", [{"input_ids": ids, "attention_mask": mask}], 3, sum(sizes))
    ctx = harness.make_context(tmp_path / "out")
    with collect_statistics(model, padded, layers, ctx) as statistics:
        assert shapes == {(24, 96)}
    with collect_statistics(
        model, CalibrationSamples("made", texts, 3, sum(sizes)), layers, ctx
    ) as single_texts:
        for name in layers:
            padded_statistics, single_statistics = statistics[name], single_texts[name]
            assert padded_statistics.tokens == single_statistics.tokens == sum(sizes)
            for part in ("magnitudes", "sums", "squares", "second_moment"):
                torch.testing.assert_close(
                    getattr(padded_statistics, part), getattr(single_statistics, part), rtol=1e-4, atol=1e-4
                )


def test_layers_of_one_key_share_a_sum_and_second_moments_are_optional(model, rows, tmp_path):
    one, other = (model.bert.encoder.layer[n].output.dense for n in (0, 1))
    ctx = harness.make_context(tmp_path / "out")
    with (
        collect_statistics(model, rows, {"a": [one], "b": [other]}, ctx, second=False) as apart,
        collect_statistics(model, rows, {"both": [one, other]}, ctx, second=False) as both,
    ):
        assert both["both"].tokens == 78
        assert both["both"].second_moment is None
        torch.testing.assert_close(both["both"].squares, apart["a"].squares + apart["b"].squares)
        with pytest.raises(ValueError):  # noqa: PT011  (it raises no other)
            both["both"].centered_second_moment()


@pytest.mark.quick
def test_sum_of_many_small_values_is_accurate(tmp_path):
    """In float32 the last thousand tokens would change nothing compared with 10^8."""
    statistics = empty_statistics(1, second=True)
    statistics.update(torch.full((1, 1), 1e4))
    for _ in range(1000):
        statistics.update(torch.ones(1, 1))
    assert float(statistics.second_moment) == 1e8 + 1000


def test_threads_of_the_context_are_used(model, rows, tmp_path, monkeypatch):
    thread_counts = []
    monkeypatch.setattr(
        statistics, "observe_inputs", lambda *_: thread_counts.append(torch.get_num_threads())
    )
    before = torch.get_num_threads()
    with collect_statistics(model, rows, layers_of(model), harness.make_context(tmp_path / "out", threads=3)):
        pass
    assert thread_counts == [3]
    assert torch.get_num_threads() == before
