"""Statistics that were kept are those of a pass, to the bit; a second step makes none."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from smelt.calibration import statistics
from smelt.calibration import statistics as statistics_cache
from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.statistics import batches_fingerprint, cached_statistics
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.core.stage_cache import StageCache
from smelt.core.store import Store
from smelt.models.checkpoint import load_model
from tests.support import harness
from tests.support.models import every_family, tiny


@pytest.fixture
def passes(monkeypatch):
    """How often a model is run over rows."""
    calls, observe = [], statistics.observe_inputs
    monkeypatch.setattr(statistics, "observe_inputs", lambda *a: (calls.append(1), observe(*a)))
    return calls


@pytest.fixture
def shop(tmp_path):
    return StageCache(Store(tmp_path / "store"), {}, lambda text: None)


def rows_of(*sizes):
    draw = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(5, 20, size, generator=draw)} for size in sizes]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return CalibrationSamples("made", batches, 5, 39)


@pytest.mark.parametrize("second", [True, False])
def test_loaded_statistics_equal_computed_ones(tmp_path, passes, shop, second):
    model = load_model(every_family.model_with_layers("bert", 2))[0]
    layers = {"fc2": [model.bert.encoder.layer[0].output.dense]}
    results = []
    for name in ("a", "b"):
        ctx = harness.make_context(tmp_path / name / "out", cached_files=shop.cached_files)
        with cached_statistics(
            model, rows_of((2, 9), (3, 7)), layers, ctx, artifact_key="k", second=second
        ) as cached:
            results.append(cached["fc2"])
    assert passes == [1]
    ctx = harness.make_context(tmp_path / "c" / "out")
    with statistics.collect_statistics(model, rows_of((2, 9), (3, 7)), layers, ctx, second=second) as cached:
        alone = cached["fc2"]
    for result in results:
        assert result.tokens == alone.tokens == 39
        for name in ("sums", "squares", "magnitudes"):
            assert torch.equal(getattr(result, name), getattr(alone, name))
        assert (result.second_moment is None) == (not second)
        assert not second or torch.equal(result.second_moment, alone.second_moment)


def test_changed_rows_model_or_layers_are_computed_again(tmp_path, passes, shop):
    model = load_model(every_family.model_with_layers("bert", 2))[0]
    fc2, query = model.bert.encoder.layer[0].output.dense, model.bert.encoder.layer[1].attention.self.query
    rows = rows_of((2, 9))
    requests = [
        (rows, {"fc2": [fc2]}, "k"), (rows_of((2, 8)), {"fc2": [fc2]}, "k"), (rows, {"fc2": [fc2]}, "other"),
        (rows, {"q": [query]}, "k"), (rows, {"fc2": [fc2]}, "k"),
    ]  # fmt: skip
    for samples, layers, of in requests:
        ctx = harness.make_context(tmp_path / "out", cached_files=shop.cached_files)
        with cached_statistics(model, samples, layers, ctx, artifact_key=of):
            pass
    assert len(passes) == len(requests) - 1
    assert (
        batches_fingerprint(rows_of((2, 9)))
        == batches_fingerprint(rows)
        != batches_fingerprint(rows_of((2, 8)))
    )


@pytest.mark.parametrize("why", ["limit", "disk"])
def test_oversized_statistics_are_not_cached(tmp_path, passes, shop, monkeypatch, why):
    model = load_model(every_family.model_with_layers("bert", 2))[0]
    layers = {"fc2": [model.bert.encoder.layer[0].output.dense]}
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    if why == "disk":
        monkeypatch.setattr(statistics_cache.shutil, "disk_usage", lambda path: usage)
    ctx = harness.make_context(tmp_path / "out", cached_files=shop.cached_files)
    limit = 100 if why == "limit" else 2**30
    with cached_statistics(
        model, rows_of((2, 9)), layers, ctx, artifact_key="k", limit_bytes=limit
    ) as cached:
        assert cached["fc2"].tokens == 18
    assert passes == [1]
    assert not list((tmp_path / "store").glob("kept/*"))


def test_second_rank_reuses_the_pass_and_gets_the_same_pairs(tmp_path, passes, shop):
    rows = tiny.read_pairs(tmp_path)
    source = tiny.write_marian(tmp_path / "m")

    def go(name, ratio, **more):
        settings = FactorizeSettings.model_validate(
            {"method": "whitened-svd", "keep_ratio": ratio, "optimize_for": "size"}
        )
        return harness.run_stage(Factorize(), settings, source, tmp_path / name / "out", data=rows, **more)

    go("a", 0.8, cached_files=shop.cached_files)
    again = go("b", 0.5, cached_files=shop.cached_files)
    assert passes == [1]
    alone = go("c", 0.5)
    assert passes == [1, 1]
    one, other = (load_file(ctx.out / "model.safetensors") for ctx in (again, alone))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
