"""The worker, in this process: what it times, and that it times what `smelt.load` does."""

import gc
import shutil
import time

import numpy as np
import pytest
import torch

from smelt.core.store import Store
from smelt.data.splits import Example
from smelt.evaluate.latency.worker import TimingWorker, add_first_token_time, batch_by_length
from tests.support.models import causal, tiny

GENERATION = {"max_new_tokens": 5}


def _artifact(folder, task):
    """Put a model into a store, so that it has a manifest with hashes."""
    make_model = {"translation": tiny.write_marian, "text-classification": tiny.write_bert}
    store = Store(folder / "store")
    with store.workspace() as work:
        if task == "language-modeling":
            causal.write_model(work / "m", "gpt2")
        else:
            make_model[task](work / "m")
        return store.commit(work / "m", tiny.as_artifact(work / "m", task).manifest).path


def _load(folder, task):
    worker = TimingWorker()
    answer = worker.handle_request({"op": "load", "artifact": str(folder), "threads": 1, "task": task})
    assert answer["runner"].startswith("torch "), answer
    assert answer["device"] == "cpu"
    return worker


def _prepare(worker, texts, size, pairs=None, limit_ms=60_000, generation=GENERATION):
    request = {"op": "prepare", "texts": texts, "pairs": pairs, "batch_size": size, "limit_ms": limit_ms}
    answer = worker.handle_request(request | {"generation": generation})
    assert "error" not in answer, answer
    return answer


def test_round_uses_the_same_functions_as_smelt_load(tmp_path, monkeypatch):
    from smelt.runtimes import predict_texts

    folder = _artifact(tmp_path, "translation")
    worker = _load(folder, "translation")
    texts = tiny.SENTENCES[:4]
    prepared = _prepare(worker, texts, 2)
    assert prepared["whole"]
    assert 0 < prepared["output_tokens"] <= 5
    calls = []
    original = predict_texts.generate_texts
    monkeypatch.setattr(
        predict_texts, "generate_texts", lambda *a, **k: calls.append((a[1], a[2], a[3])) or original(*a, **k)
    )
    answer = worker.handle_request({"op": "round", "min_ms": 1})
    longest = sorted(texts, key=lambda text: -len(text))
    assert [group for group, *_ in calls] == [
        longest[2:],
        longest[:2],
        longest[2:],
    ]  # one unasked, to warm up
    assert all((g.max_new_tokens, size) == (5, 2) for _, g, size in calls)
    assert len(answer["times_ms"]) == len(answer["parts"]) == len(answer["graph_ms"]) == 2
    for call_ms, graph_ms in zip(answer["times_ms"], answer["graph_ms"], strict=True):
        assert 0 < graph_ms < call_ms
    assert answer["texts"] == 4
    for call_ms, parts in zip(answer["times_ms"], answer["parts"], strict=True):
        assert sum(parts[:4]) + parts[5] == pytest.approx(call_ms, rel=0.05)
        assert min(parts[:3]) > 0


def test_output_tokens_are_counted_from_generated_sequences(tmp_path):
    from smelt.core.artifact import read_artifact
    from smelt.generation.config import GenerationSettings
    from smelt.generation.search import generate
    from smelt.models.checkpoint import load_tokenizer
    from smelt.runtimes.predict_texts import make_batches
    from smelt.runtimes.registry import open_runner

    folder = _artifact(tmp_path, "translation")
    texts = tiny.SENTENCES[:4]
    prepared = _prepare(_load(folder, "translation"), texts, 2, generation={"max_new_tokens": 30})
    tokenizer = load_tokenizer(folder)
    with open_runner(read_artifact(folder), 1) as runner:
        batches = make_batches(texts, tokenizer, 4, 40)
        generated = [generate(runner, batch, GenerationSettings(max_new_tokens=30)) for _, batch in batches]
    lengths = [len(row) for batch_rows in generated for row in batch_rows]
    assert prepared["output_tokens"] == pytest.approx(np.mean(lengths))
    assert prepared["input_tokens"] == pytest.approx(
        np.mean([len(ids) for ids in tokenizer(texts)["input_ids"]])
    )


def test_classifier_timing_includes_labels_and_pairs(tmp_path, monkeypatch):
    import smelt.runtimes.single_call_runners as labels

    folder = _artifact(tmp_path, "text-classification")
    worker = _load(folder, "text-classification")
    single_answer = _prepare(worker, ["a man", "two dogs"], 2)
    pair_answer = _prepare(worker, ["a man", "two dogs"], 2, pairs=["the cat", "a song"])
    assert pair_answer["input_tokens"] == single_answer["input_tokens"] + 3  # two words and a separator
    assert pair_answer["output_tokens"] == 0
    predictions = []
    original = labels.predictions_from_logits
    monkeypatch.setattr(
        labels, "predictions_from_logits", lambda *a: predictions.append(original(*a)) or predictions[-1]
    )
    answer = worker.handle_request({"op": "round", "min_ms": 1})
    assert {p.label for p in predictions[0]} <= {"LABEL_0", "LABEL_1"}
    assert all(len(parts) == 3 for parts in answer["parts"])


def test_language_model_worker_generates_exact_number_of_tokens(tmp_path):
    folder = _artifact(tmp_path, "language-modeling")
    worker = _load(folder, "language-modeling")
    cut_answer = worker.handle_request(
        {"op": "cut", "texts": [causal.TEXT], "prompt_tokens": 9, "new_tokens": 6}
    )
    assert cut_answer["new_tokens"] == 6
    fixed = {"min_new_tokens": 6, "max_new_tokens": 6}
    prepared = _prepare(worker, cut_answer["texts"], 1, generation=fixed)
    assert 5 <= prepared["input_tokens"] <= 9
    assert prepared["output_tokens"] == 6
    answer = worker.handle_request({"op": "round", "min_ms": 1})
    assert {parts[4] for parts in answer["parts"]} == {5.0}


def test_round_times_only_calls_in_complete_passes(monkeypatch) -> None:
    worker, calls = TimingWorker(), []

    class Watch:
        last_graph_call = None

        def start_call(self):
            return time.perf_counter_ns()

        def call_parts(self, begin, end):
            return None

    def sleepy(group):
        calls.append(len(group[0].text))
        time.sleep(0.005)

    worker._timed_runner, worker._groups = Watch(), [[Example("xxx")] * 2, [Example("x")] * 2]
    monkeypatch.setattr(worker, "_run_batch", sleepy)
    gc.disable()
    try:
        answer = worker.handle_request({"op": "round", "min_ms": 25})
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()
    times = answer["times_ms"]
    assert calls[0] == 1, "the shortest batch warms up, untimed"
    assert len(times) == len(calls) - 1
    assert len(times) % 2 == 0
    assert sum(times) >= 20
    assert min(times) >= 5
    assert answer["texts"] == 2 * len(times)
    assert answer["parts"] == []
    assert answer["load"]["wall_ms"] >= 25
    # it slept, so it used no processor: with one thread that is a round that was disturbed
    assert answer["load"]["processor_ms"] < 0.5 * answer["load"]["wall_ms"]


class Looping:
    """A watch over a graph that holds the loop: 3 tokens in 6 ms; first tokens as `firsts` says, ms."""

    def __init__(self, firsts):
        self.last_graph_call, self.firsts = "what", iter(firsts)

    def start_call(self):
        return time.perf_counter_ns()

    def call_parts(self, begin, end):
        return [1.0, 6.0, 2.0, 1.0]

    def first_token_ms(self, asked):
        assert asked == "what"
        return next(self.firsts)


def test_disturbed_first_token_time_is_ignored(monkeypatch):
    worker = TimingWorker()
    monkeypatch.setattr(worker, "_run_batch", lambda group: None)
    worker._timed_runner, worker._groups = (
        Looping([2.0, 50.0, 2.5, 3.0, 3.5, 0.1]),
        [[Example("a")], [Example("b")]],
    )
    answer = worker.handle_request({"op": "round", "min_ms": 0.001})
    assert answer["parts"][:2] == [[1.0, 6.0, 2.0, 1.0, 2.5], [1.0, 6.0, 2.0, 1.0, 3.0]]


def test_long_prompt_without_generation_graph_has_no_first_token_time(monkeypatch):
    """Groups of one worker differ: a graph's loop takes short prompts, the steps take long ones."""
    worker, timed_runner = TimingWorker(), Looping([2.0, 2.5, 3.0])
    worker._timed_runner, worker._groups = timed_runner, [[Example("long" * 99)], [Example("a")]]
    calls = {id(worker._groups[0]): None, id(worker._groups[1]): "what"}
    monkeypatch.setattr(
        worker, "_run_batch", lambda group: setattr(timed_runner, "last_graph_call", calls[id(group)])
    )
    assert worker._first_token_times() == [None, 2.5]


def test_time_per_output_token_is_never_negative():
    assert add_first_token_time([1.0, 6.0, 2.0, 1.0], 7.0) == [1.0, 6.0, 2.0, 1.0, 6.0]
    assert add_first_token_time([1.0, 6.0, 2.0, 1.0], 4.0) == [1.0, 6.0, 2.0, 1.0, 4.0]
    # without a further one the first is all, and the parts add up to the call
    assert add_first_token_time([1.0, 6.0, 0.0, 1.0], 4.0) == [1.0, 6.0, 0.0, 1.0, 6.0]


def test_batches_have_similar_lengths_and_longest_is_first():
    groups = batch_by_length(["a", "ccc", "bb", "dddd", "é"], ["1", None, "2", None, "3"], 2)
    assert [[e.text for e in group] for group in groups] == [["dddd", "ccc"], ["bb", "é"], ["a"]]
    assert groups[1][0].text_pair == "2"


def test_worker_returns_errors_as_answers(tmp_path):
    answer = TimingWorker().handle_request(
        {"op": "load", "artifact": str(tmp_path), "threads": 1, "task": "translation"}
    )
    assert (answer["code"], str(tmp_path) in answer["error"]) == ("not-an-artifact", True)
    answer = TimingWorker().handle_request({"op": "prepare"})
    assert answer["code"] == "unforeseen"
    assert answer["error"].startswith("AssertionError")
    assert TimingWorker().handle_request({"op": "memory"})["peak_bytes"] > 2**20


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile requires a C++ compiler")
def test_compiled_baseline_is_compiled_before_anything_is_timed(tmp_path):
    folder = _artifact(tmp_path, "text-classification")
    worker = TimingWorker()
    request = {"op": "load", "artifact": str(folder), "threads": 1, "task": "text-classification"}
    assert "torch.compile" in worker.handle_request(request | {"compiled": True})["runner"]
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    texts = ["a man walks", "two dogs", "a song", "the cat sings a song"]
    assert _prepare(worker, texts, 2)["whole"]
    compiled_graphs = counters["unique_graphs"]
    assert compiled_graphs >= 1
    assert "error" not in worker.handle_request({"op": "round", "min_ms": 1})
    assert counters["unique_graphs"] == compiled_graphs
    with torch.inference_mode():
        model = worker._timed_runner.backend.model
        batch = worker._timed_runner.batch
        inputs = {n: torch.from_numpy(getattr(batch, n)) for n in ("input_ids", "attention_mask")}
        torch.testing.assert_close(model(**inputs).logits, model.forward(**inputs).logits)
