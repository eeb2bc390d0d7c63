"""Who is timed when: with forked processes, and with made-up ones whose times are known."""

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from smelt.core.artifact import Manifest, write_manifest
from smelt.core.errors import InputError
from smelt.core.store import Store
from smelt.evaluate.latency import LatencySettings, TimingJob, measure_latency, measurement
from smelt.evaluate.latency import measurement as worker_process
from smelt.evaluate.report.step_schema import LatencyReport
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.processes import forked_workers
from tests.support.standins import fake_workers

TEXTS = [f"{'word ' * n}end" for n in range(1, 13)]


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


def test_measurement_continues_after_broken_artifact(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked_workers.install(monkeypatch)
    settings = LatencySettings(batch_sizes=(1, 4), threads=1, rounds=3, texts=4, min_round_ms=1)
    artifacts = {"model": classifier, "broken": tmp_path, "same": classifier}
    progress_calls: list[tuple[int, int]] = []
    result = measure_latency(
        artifacts,
        "model",
        TimingJob(TEXTS, "text-classification", settings),
        progress=lambda d, t, note="": progress_calls.append((d, t)),
    )
    assert set(result.rows) == {"model", "same"}
    assert {name: error.code for name, error in result.errors.items()} == {"broken": "not-an-artifact"}
    for latency_rows in result.rows.values():
        assert [r["batch_size"] for r in latency_rows] == [1, 4]
        for row in latency_rows:
            LatencyReport.model_validate(row)
            assert (row["threads"], row["texts"]) == (
                1,
                2 * row["batch_size"] if row["batch_size"] > 2 else 4,
            )
            assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
            assert row["output_tokens"] is None  # a classifier writes none
    # the middles of the four quarters have 2, 5, 8 and 11 times "word"; "end", [CLS] and [SEP] make 3 more
    assert result.rows["same"][0]["input_tokens"] == pytest.approx(statistics.fmean([5, 8, 11, 14]))
    same_row = result.rows["same"][0]
    assert same_row["speedup_ci95"][0] <= same_row["speedup"] <= same_row["speedup_ci95"][1]
    assert 3 <= len(same_row["rounds_ms"]) <= 9
    assert result.rows["model"][0]["speedup_ci95"] == [1.0, 1.0]
    # a process with torch loaded holds more than 50 MiB and less than 8 GiB
    assert all(50 * 2**20 < b < 8 * 2**30 for b in result.peak_memory_bytes.values())
    assert result.runners["same"].startswith("torch ")
    assert progress_calls[-1][0] <= progress_calls[-1][1]


def test_missing_texts_and_unknown_baseline_are_rejected(tmp_path: Path) -> None:
    with raises_code("empty-data", InputError):
        measure_latency({"a": tmp_path}, "a", TimingJob([], "translation", LatencySettings()))
    with raises_code("unknown-step", InputError) as excinfo:
        measure_latency({"a": tmp_path}, "b", TimingJob(["x"], "translation", LatencySettings()))
    assert all(value in str(excinfo.value) for value in ("'b'", " a."))


@pytest.fixture
def fake(monkeypatch):
    return fake_workers.install(monkeypatch)


SETTINGS = LatencySettings(batch_sizes=(1,), rounds=4)
NO_COUNTS: dict[int, int] = {}


def _measure(*names, settings=SETTINGS, counts=NO_COUNTS, **options):
    folders = {name: Path("/nowhere") / name for name in names}
    job = TimingJob(TEXTS, "translation", settings, text_counts=counts)
    return measure_latency(folders, "base", job, **options)


def test_double_speed_is_reported_on_idle_machine(fake):
    (row,) = _measure("base", "twice").rows["twice"]
    assert row["stable"]
    assert row["speedup"] == pytest.approx(2, rel=0.01)
    low, high = row["speedup_ci95"]
    assert 1.9 < low < 2 < high < 2.1
    assert len(row["rounds_ms"]) == 4  # none had to be repeated


@pytest.mark.parametrize(
    ("threads", "expected"), [(None, {"base": 1, "twice": 3}), (2, {"base": 2, "twice": 2})]
)
def test_artifact_is_timed_with_its_own_thread_count(fake, monkeypatch, threads, expected):
    monkeypatch.setattr(worker_process, "_stored_threads", lambda path: 3 if path.name == "twice" else None)
    settings = SETTINGS.model_copy(update={"threads": threads})
    result = _measure("base", "twice", settings=settings)
    assert {name: latency_rows[0]["threads"] for name, latency_rows in result.rows.items()} == expected


def test_thread_count_is_read_from_manifest(tmp_path):
    assert worker_process._stored_threads(tmp_path) is None  # no manifest: its worker reports it
    manifest = tiny.as_artifact(tmp_path, "translation").manifest
    manifest.details["threads"] = 2
    write_manifest(tmp_path, manifest)
    assert worker_process._stored_threads(tmp_path) == 2


def test_rounds_alternate_execution_order(fake):
    _measure("base", "twice")
    assert [name for op, name in fake.asked if op == "round"] == [
        *("twice", "base", "base", "twice", "twice", "base", "base", "twice")
    ]


def test_disturbed_rounds_are_repeated_until_enough_are_valid(fake):
    fake.used = staticmethod(lambda folder, number: 0.5 if number <= 3 else 0.99)
    result = _measure("base", "twice")
    (row,) = result.rows["twice"]
    assert [r["counted"] for r in row["rounds"]] == [False] * 3 + [True] * 4
    assert row["stable"]
    assert [r["counted"] for r in result.rows["base"][0]["rounds"]] == [False] * 3 + [True] * 4


def test_permanently_disturbed_measurement_is_flagged_unstable(fake):
    fake.used = staticmethod(lambda folder, number: 0.5)
    progress_calls = []
    result = _measure("base", "twice", progress=lambda d, t, note="": progress_calls.append((d, t, note)))
    for name in ("base", "twice"):
        (row,) = result.rows[name]
        assert len(row["rounds_ms"]) == 12  # three times what was asked for
        assert not row["stable"]
        assert row["cause"] == "busy"
        assert re.findall(r"\d+", row["reason"]) == ["12", "12", "50"]  # rounds, of rounds, per cent
    assert progress_calls[-1] == (12, 12, "twice, batch 1, again")
    assert progress_calls[3] == (4, 4, "twice, batch 1")


class _Clock:
    """A clock that every round of a worker moves on by a second."""

    def __init__(self, fake):
        self.fake = fake

    def __call__(self):
        return float(sum(op == "round" for op, _ in self.fake.asked))


def test_rounds_stop_at_their_time_budget(fake, monkeypatch):
    monkeypatch.setattr(measurement.time, "monotonic", _Clock(fake))
    fake.used = staticmethod(lambda folder, number: 0.5)  # three times as many rounds as asked for, else
    settings = SETTINGS.model_copy(update={"batch_sizes": (1, 4)})
    result = _measure("base", "twice", "same", settings=settings, seconds=40.0)
    round_counts = [len(row["rounds"]) for name in ("twice", "same") for row in result.rows[name]]
    assert round_counts == [5, 5, 5, 5]  # of 40 s four shares, and a pair takes two
    row = result.rows["twice"][0]
    assert (row["stable"], row["cause"]) == (False, "busy")
    assert row["cpu_speedup"] == pytest.approx(2, rel=0.01)


def test_minimum_rounds_report_cpu_time_without_time_budget(fake, monkeypatch):
    monkeypatch.setattr(measurement.time, "monotonic", _Clock(fake))
    fake.used = staticmethod(lambda folder, number: 0.5)
    result = _measure("base", "twice", "same", seconds=1.0)
    for name, ratio in (("twice", 2), ("same", 1)):
        (row,) = result.rows[name]
        assert (len(row["rounds"]), row["stable"], row["cause"]) == (3, False, "busy")
        assert row["cpu_speedup"] == pytest.approx(ratio, rel=0.01)
        low, high = row["cpu_speedup_ci95"]
        assert low <= row["cpu_speedup"] <= high
    (base,) = result.rows["base"]
    assert (base["cpu_speedup"], base["cpu_speedup_ci95"]) == (1.0, [1.0, 1.0])


def test_time_of_failed_artifact_is_used_by_others(fake, monkeypatch):
    monkeypatch.setattr(measurement.time, "monotonic", _Clock(fake))
    fake.used = staticmethod(lambda folder, number: 0.5)
    fake.fails = staticmethod(lambda folder, number: folder == "broken")
    settings = SETTINGS.model_copy(update={"batch_sizes": (1, 4)})
    result = _measure("base", "broken", "twice", settings=settings, seconds=40.0)
    assert [len(row["rounds"]) for row in result.rows["twice"]] == [10, 10]  # of 40 s two shares


def test_short_time_budget_reduces_number_of_texts(fake):
    slow = LatencySettings(batch_sizes=(4,), rounds=4)  # a call takes 20 ms
    assert _measure("base", settings=slow).rows["base"][0]["texts"] == 16
    assert not _measure("base", settings=slow).reduced
    short_results = _measure("base", "twice", settings=slow, seconds=0.34)
    assert (short_results.rows["base"][0]["texts"], short_results.reduced) == (8, True)
    assert not _measure("base", "twice", settings=slow, seconds=30.0).reduced  # less time, and enough of it


def test_progress_is_reported_after_each_artifact(fake):
    messages = []
    _measure(
        "base", "twice", "same", on_measured=lambda result, name: messages.append((name, sorted(result.rows)))
    )
    assert messages == [("twice", ["base", "twice"]), ("same", ["base", "same", "twice"])]


def test_text_counts_of_previous_run_are_reused(fake):
    assert _measure("base", "twice").rows["twice"][0]["texts"] == 16
    assert _measure("base", "twice", counts={1: 5}).rows["twice"][0]["texts"] == 5
    slow = LatencySettings(batch_sizes=(4,), rounds=4, seconds=0.4)  # 5 calls of 20 ms in each of 4 rounds
    assert _measure("base", settings=slow).rows["base"][0]["texts"] == 16
    assert _measure("base", settings=slow.model_copy(update={"seconds": 0.17})).rows["base"][0]["texts"] == 8


def test_failed_baseline_gives_times_without_speedup(fake):
    fake.fails = staticmethod(lambda folder, number: folder == "base" and number > 2)
    result = _measure("base", "twice")
    (row,) = result.rows["twice"]
    assert (row["speedup"], row["speedup_ci95"], row["stable"]) == (None, None, True)
    assert row["p50_ms"] == pytest.approx(10, rel=0.02)
    assert {name: error.code for name, error in result.errors.items()} == {"base": "made-up"}


def test_language_models_generate_exact_number_of_tokens(fake, monkeypatch):
    requests = {}

    def ask(self, op, **request):
        if op == "cut":
            requests["cut"] = request
            return {"texts": ["a b c", "d e f"], "new_tokens": 7}
        if op == "prepare":
            requests["prepare"] = request
        return fake_workers.FakeWorker.ask(self, op, **request)

    fake.ask = ask
    settings = LatencySettings(batch_sizes=(1,), rounds=3, prompt_tokens=5, new_tokens=9)
    folders = {"base": Path("/nowhere/base")}
    (row,) = measure_latency(folders, "base", TimingJob(TEXTS, "language-modeling", settings)).rows["base"]
    assert (requests["cut"]["prompt_tokens"], requests["cut"]["new_tokens"]) == (5, 9)
    assert (requests["prepare"]["generation"]["min_new_tokens"], row["unit"]) == (7, "tokens/s")
    assert requests["prepare"]["generation"]["max_new_tokens"] == 7
    assert set(requests["prepare"]["texts"]) == {"a b c", "d e f"}
    assert row["throughput"] == pytest.approx(4 * 1000 / 20, rel=0.02)  # 4 tokens a text
