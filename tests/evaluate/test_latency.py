import json
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from transformers import BertConfig, BertForSequenceClassification

from smelt.core.artifact import Manifest
from smelt.core.errors import InputError, RunError
from smelt.core.store import Store
from smelt.evaluate.latency import LatencySettings, measure
from smelt.evaluate.latency_process import WorkerProcess
from smelt.evaluate.latency_summary import Timing, speedup, spread, summarize
from smelt.runtime.runner import Batch

TEXTS = [f"{'word ' * n}end" for n in range(1, 13)]
KEYS = {
    "batch_size",
    "threads",
    "input_tokens",
    "output_tokens",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "throughput",
    "unit",
    "speedup",
    "speedup_ci95",
    "rounds_ms",
}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("store"))
    config = BertConfig(
        vocab_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    with store.workspace() as work:
        out = work / "model"
        torch.manual_seed(0)
        BertForSequenceClassification(config).save_pretrained(out)
        (out / "vocab.txt").write_text(
            "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "end", "a"])
        )
        settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 16}
        (out / "tokenizer_config.json").write_text(json.dumps(settings))
        manifest = Manifest(
            key="a" * 64,
            format="torch",
            task="text-classification",
            stage="model",
            settings={},
            seed=0,
            parent=None,
            versions={},
        )
        return store.commit(out, manifest).path


def test_measure_goes_on_past_a_broken_artifact(classifier: Path, tmp_path: Path) -> None:
    settings = LatencySettings(batch_sizes=(1, 4), threads=1, rounds=3, texts=4, min_round_ms=1)
    artifacts = {"model": classifier, "broken": tmp_path, "same": classifier}
    seen: list[tuple[int, int]] = []
    result = measure(
        artifacts,
        "model",
        TEXTS,
        settings,
        "text-classification",
        progress=lambda d, t, note="": seen.append((d, t)),
    )
    assert set(result.rows) == {"model", "same"}
    assert "no manifest.json" in result.errors["broken"]
    assert set(result.errors) == {"broken"}
    for rows in result.rows.values():
        assert [r["batch_size"] for r in rows] == [1, 4]
        for row in rows:
            assert set(row) == KEYS
            assert row["threads"] == 1
            assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
            assert row["output_tokens"] == 0
    # the middles of the four quarters have 2, 5, 8 and 11 times "word"; "end", [CLS] and [SEP] make 3 more
    assert result.rows["same"][0]["input_tokens"] == pytest.approx(statistics.fmean([5, 8, 11, 14]))
    same = result.rows["same"][0]
    assert same["speedup_ci95"][0] <= same["speedup"] <= same["speedup_ci95"][1]
    assert len(same["rounds_ms"]) == 3
    assert result.rows["model"][0]["speedup_ci95"] == [1.0, 1.0]
    # a process with torch loaded holds more than 50 MiB and less than 8 GiB
    assert all(50 * 2**20 < b < 8 * 2**30 for b in result.peak_memory_bytes.values())
    assert result.runners["same"].startswith("torch ")
    assert seen[-1][0] <= seen[-1][1]


def test_measure_refuses_no_texts_and_an_unknown_baseline(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no texts"):
        measure({"a": tmp_path}, "a", [], LatencySettings(), "translation")
    with pytest.raises(InputError, match="baseline 'b' is not among a"):
        measure({"a": tmp_path}, "b", ["x"], LatencySettings(), "translation")


@pytest.mark.parametrize(
    "wrong", [{"batch_sizes": []}, {"batch_sizes": [0]}, {"batch_sizes": [2, 2]}, {"rounds": 2}]
)
def test_settings_refuse_when_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LatencySettings.model_validate(wrong)


def test_worker_ends_when_its_pipe_closes() -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        assert worker.ask(op="memory")["peak_bytes"] > 0
        assert worker._process.stdin is not None
        worker._process.stdin.close()
        assert worker._process.wait(timeout=10) == 0


def test_worker_that_dies_is_an_error_that_names_the_signal() -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        worker.ask(op="memory")
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(RunError, match="ended during 'memory' with signal 9"):
            worker.ask(op="memory")
        assert not worker.alive


def test_worker_that_is_silent_beyond_the_limit_is_given_up() -> None:
    with WorkerProcess(threads=1, time_limit=0.001) as worker:
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"no answer to 'memory' within 0\.001 s"):
            worker.ask(op="memory")
        assert time.monotonic() - begin < 5


def test_round_times_only_the_calls_and_whole_passes() -> None:
    from smelt.evaluate.latency_worker import Worker

    worker = Worker()
    batches = [Batch(np.ones((2, n), np.int64), np.ones((2, n), np.int64)) for n in (3, 1)]
    calls: list[int] = []

    def sleepy(batch: Batch) -> int:
        calls.append(batch.input_ids.shape[1])
        time.sleep(0.005)
        return 4

    worker._batches, worker._run = batches, sleepy
    answer = worker.answer({"op": "round", "min_ms": 25})
    times = answer["times_ms"]
    assert calls[0] == 1, "the shortest batch warms up, untimed"
    assert len(times) == len(calls) - 1
    assert len(times) % 2 == 0
    assert sum(times) >= 20
    assert min(times) >= 5
    assert answer["texts"] == 2 * len(times)
    assert answer["output_tokens"] == 2.0


def test_speedup_is_the_median_ratio_and_its_interval_covers_it() -> None:
    baseline, own = [10.0, 11.0, 12.0, 10.0, 10.0], [5.0, 5.0, 5.0, 4.0, 2.0]
    value, (low, high) = speedup(baseline, own)
    assert value == pytest.approx(2.4)  # of 2, 2.2, 2.4, 2.5, 5
    reference = stats.bootstrap(
        ([2, 2.2, 2.4, 2.5, 5],),
        np.median,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=0.05)


def test_summary_of_known_calls() -> None:
    row = summarize(Timing(3.0, 2.0, rounds=[[1.0, 2.0], [3.0, 4.0]], texts=8), None)
    assert row["p50_ms"] == 2.5
    assert row["p90_ms"] == pytest.approx(3.7)
    assert row["throughput"] == pytest.approx(800)  # 8 texts in 10 ms
    assert row["rounds_ms"] == [1.5, 3.5]
    assert row["speedup"] is None


def test_spread_takes_the_middles_of_equal_shares_of_the_lengths() -> None:
    texts = ["x" * n for n in (9, 1, 5, 7, 3, 2, 8, 4, 6, 10)]
    assert [len(texts[i]) for i in spread(texts, 5)] == [2, 4, 6, 8, 10]
    assert len(spread(["a", "b"], 6)) == 6
