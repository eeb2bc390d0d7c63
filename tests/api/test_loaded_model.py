"""`smelt.load`: what it imports, many threads at once, what was closed, and texts that are too long."""

import inspect
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import smelt
from smelt.api.load import parse_generation
from smelt.core.files import write_hashed_json
from smelt.runtimes.registry import open_runner
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

LONG = " ".join(tiny.SENTENCES * 6)


def _use(model, texts):
    """Return what the model makes of `texts`, whatever it is for."""
    if model.task == "text-classification":
        return model.predict(texts)
    if model.task == "sentence-similarity":
        return model.embed(texts)
    return model.generate(texts, max_new_tokens=5)


PROBE = """
import json, sys
import smelt
for artifact in sys.argv[1:]:
    with smelt.load(artifact) as model:
        use = {"text-classification": model.predict, "sentence-similarity": model.embed}.get(model.task)
        found = use(TEXTS) if use else model.generate(TEXTS, max_new_tokens=5)
    heavy = sorted({"torch", "transformers", "datasets", "sklearn", "scipy", "onnx"} & set(sys.modules))
    print(json.dumps([heavy, [str(one) for one in found]]))
"""


def test_onnx_artifacts_run_without_torch_and_transformers():
    artifacts = [exported_artifacts.exported_artifact(kind) for kind in exported_artifacts.TEXT_KINDS]
    code = PROBE.replace("TEXTS", repr(tiny.SENTENCES[:3]))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, artifacts)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for kind, artifact, line in zip(exported_artifacts.TEXT_KINDS, artifacts, lines, strict=True):
        heavy, outputs = json.loads(line)
        assert heavy == [], kind
        with smelt.load(artifact) as model:
            assert outputs == [str(output) for output in _use(model, tiny.SENTENCES[:3])], kind


def test_artifact_without_tokenizing_json_uses_transformers_with_equal_outputs(tmp_path):
    """An export of an earlier version has no tokenizing.json."""
    source = exported_artifacts.exported_artifact("translator").resolve()
    for path in source.iterdir():
        if path.name != "tokenizing.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((source / "manifest.json").read_text())
    del content["files"]["tokenizing.json"]
    write_hashed_json(tmp_path / "manifest.json", content)
    with smelt.load(source) as new, smelt.load(tmp_path) as old:
        assert (new.tokenizer, old.tokenizer) == ("sentencepiece", "transformers")
        assert new.generate(tiny.SENTENCES) == old.generate(tiny.SENTENCES)


@pytest.mark.parametrize(
    ("kind", "step"),
    [("translator", "onnx"), ("classifier", "onnx"), ("writer", "onnx"), ("translator", "model")],
)
def test_concurrent_requests_equal_single_requests(kind, step):
    """Another thread opens and closes models meanwhile; texts that are cut are among the requests."""
    artifact, other = (
        exported_artifacts.exported_artifact(kind, step),
        exported_artifacts.exported_artifact("translator"),
    )
    texts = [*tiny.SENTENCES, LONG]
    count = 120 if step == "onnx" else 60
    requests = [[texts[(i + k) % len(texts)] for k in range(1 + i % 3)] for i in range(count)]
    stop, opened = threading.Event(), []

    def come_and_go():
        while not stop.is_set():
            with smelt.load(other, threads=1) as model:
                opened.append(model.generate(tiny.SENTENCES[:1], max_new_tokens=2))

    with warnings.catch_warnings(), smelt.load(artifact, threads=1) as model:
        warnings.simplefilter("ignore", smelt.TruncationWarning)
        expected = {tuple(r): _use(model, r) for r in requests}
        before = model.truncated
        crowd = threading.Thread(target=come_and_go)
        crowd.start()
        try:
            with ThreadPoolExecutor(6) as pool:
                outputs = list(pool.map(lambda request: _use(model, request), requests))
        finally:
            stop.set()
            crowd.join()
        assert outputs == [expected[tuple(r)] for r in requests]
        assert model.truncated - before == sum(request.count(LONG) for request in requests) > 6
    assert opened
    assert all(output == opened[0] for output in opened)


@pytest.mark.parametrize(("kind", "step"), [("translator", "model"), ("classifier", "onnx")])
def test_closed_model_raises(kind, step):
    folder = exported_artifacts.exported_artifact(kind, step)
    model = smelt.load(folder)
    model.close()
    model.close()
    for texts in (["a man"], []):
        with raises_code("model-closed", smelt.InputError) as excinfo:
            _use(model, texts)
        # the folder that was opened, which a run links to one of the store
        assert str(excinfo.value).startswith(f"{folder}: ")


def test_wrong_method_error_names_folder_and_right_method():
    for kind, use, task, fitting in (
        ("translator", "predict", "translation", "generate"),
        ("classifier", "generate", "text-classification", "predict"),
    ):
        folder = exported_artifacts.exported_artifact(kind)
        with smelt.load(folder) as model, raises_code("does-not-fit-task", smelt.InputError) as excinfo:
            getattr(model, use)(["a man"])
        assert str(excinfo.value).startswith(f"{folder}: ")
        message = str(excinfo.value).removeprefix(f"{folder}: ")
        assert re.findall(rf"\b(?:predict|generate|{task})\b", message) == [use, task, fitting]


@pytest.mark.parametrize("folder", [None, b"runs"])
def test_folder_of_wrong_type_is_rejected(folder):
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.load(folder)
    assert excinfo.value.setting == "artifact"
    assert repr(folder) in str(excinfo.value)


def test_only_unknown_setting_lists_known_ones():
    with raises_code("unknown-setting", smelt.InputError) as excinfo:
        parse_generation({"max_new_token": 3})
    assert excinfo.value.setting == "max_new_token"
    assert all(name in str(excinfo.value) for name in ("beams, ", "'max_new_tokens'?"))
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        parse_generation({"max_new_tokens": 0})
    assert excinfo.value.setting == "max_new_tokens"
    assert "beams" not in str(excinfo.value)


WORKER_CALLS = {
    "translator": lambda model, texts: model.generate(texts, 2, max_new_tokens=5),
    "writer": lambda model, texts: model.generate(texts, 2, max_new_tokens=5, do_sample=True, seed=3),
    "classifier": lambda model, texts: model.predict(texts, 2),
    "embedder": lambda model, texts: model.embed(texts, 2).tolist(),
}


@pytest.mark.parametrize("kind", WORKER_CALLS)
def test_workers_return_the_same_results_as_one_worker(kind):
    """Samples too: random draws depend on the number of the batch, not on when it is computed."""
    artifact, call, texts = exported_artifacts.exported_artifact(kind), WORKER_CALLS[kind], tiny.SENTENCES * 3
    with smelt.load(artifact, threads=1) as one, smelt.load(artifact, threads=1, workers=3) as three:
        assert (one._runner.workers, three._runner.workers) == (1, 3)
        results = call(three, texts)
        assert results == call(one, texts)
        if kind == "translator":
            assert results == [call(one, [text])[0] for text in texts]
    assert len({str(result) for result in results}) > 3


def test_engine_runs_one_batch_at_a_time(monkeypatch):
    artifact = SimpleNamespace(
        path=None, format="tensorrt", manifest=SimpleNamespace(details={}, task="translation")
    )
    monkeypatch.setattr("smelt.runtimes.registry.open_folder", lambda *_, **__: SimpleNamespace())
    assert open_runner(artifact, 1, "auto", workers=3).workers == 1


@pytest.mark.parametrize("step", ["model", "onnx"])
def test_torch_and_onnx_calls_run_concurrently(step, monkeypatch):
    together = threading.Barrier(3)

    def meet(runner, texts, *_, **__):
        together.wait(20)
        return texts

    monkeypatch.setattr("smelt.runtimes.predict_texts.generate_texts", meet)
    with (
        smelt.load(exported_artifacts.exported_artifact("translator", step)) as model,
        ThreadPoolExecutor(3) as pool,
    ):
        assert list(pool.map(model.generate, [["a"], ["b"], ["c"]])) == [["a"], ["b"], ["c"]]


def test_only_engine_takes_one_call_at_a_time(tmp_path, monkeypatch):
    for step, expected in (("onnx", None), ("model", None)):
        with smelt.load(exported_artifacts.exported_artifact("translator", step)) as model:
            assert model._calls._max_calls is expected
    closed = []
    runner = SimpleNamespace(text=SimpleNamespace(tokenizer=None), close=lambda: closed.append(1))
    monkeypatch.setattr("smelt.runtimes.registry.open_runner", lambda *_: runner)
    monkeypatch.setattr("smelt.api.load.read_artifact", _engine)
    with smelt.load(tmp_path) as model:
        assert model._calls._max_calls == 1
    assert closed == [1]


def _engine(path):
    return SimpleNamespace(
        path=path,
        format="tensorrt",
        manifest=SimpleNamespace(details={}, task="translation"),
        verify=lambda: None,
    )


def test_unreadable_tokenizer_is_reported_on_load(tmp_path, monkeypatch):
    closed = []

    class Text:
        @property
        def tokenizer(self):
            raise smelt.InputError("no tokenizer", code="made-up")

    runner = SimpleNamespace(text=Text(), close=lambda: closed.append(1))
    monkeypatch.setattr("smelt.runtimes.registry.open_runner", lambda *_: runner)
    monkeypatch.setattr("smelt.api.load.read_artifact", _engine)
    with raises_code("made-up", smelt.InputError):
        smelt.load(tmp_path)
    assert closed == [1]


def test_failed_call_does_not_keep_model_open():
    model = smelt.load(exported_artifacts.exported_artifact("translator"))
    with pytest.raises(smelt.InputError):
        model.generate([3])
    with pytest.raises(smelt.InputError):
        model.generate(["a"], num_beams=2, do_sample=True)
    model.close()


@pytest.mark.parametrize(("kind", "limit"), [("translator", 40), ("classifier", 32), ("writer", 64)], ids=str)
def test_truncated_texts_are_counted_and_warned(kind, limit):
    with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
        with pytest.warns(smelt.TruncationWarning) as warning_records:
            _use(model, ["a man", LONG, LONG])
        (warning,) = warning_records
        assert (warning.message.count, warning.message.limit, model.truncated) == (2, limit, 2)
        lines, first = inspect.getsourcelines(_use)  # what called predict or generate, and not its caller
        assert os.path.samefile(warning.filename, __file__)
        assert first < warning.lineno < first + len(lines)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _use(model, ["a man"])
        assert model.truncated == 2


def test_truncation_warning_uses_singular():
    assert str(smelt.TruncationWarning(1, 1, 8)).startswith("1 of 1 text was ")
    assert str(smelt.TruncationWarning(1, 5, 8)).startswith("1 of 5 texts was ")


@pytest.mark.parametrize(("kind", "use"), [("translator", "generate"), ("classifier", "predict")])
def test_invalid_batch_size_is_rejected(kind, use):
    with (
        smelt.load(exported_artifacts.exported_artifact(kind)) as model,
        raises_code("wrong-value", smelt.InputError) as excinfo,
    ):
        getattr(model, use)(["a man"], batch_size=0)
    assert excinfo.value.setting == "batch_size"


@pytest.mark.parametrize(("kind", "step"), [("translator", "onnx"), ("writer", "model")])
def test_no_texts_give_no_outputs(kind, step):
    with smelt.load(exported_artifacts.exported_artifact(kind, step)) as model:
        assert model.generate([]) == model.generate((text for text in ()), num_beams=3) == []


@pytest.mark.parametrize("texts", [["a", None], [("a", "b")], "a man"])
def test_invalid_texts_are_rejected(texts):
    with (
        smelt.load(exported_artifacts.exported_artifact("translator")) as model,
        pytest.raises(smelt.InputError),
    ):
        model.generate(texts)


@pytest.mark.parametrize("threads", [0, "2"])
def test_invalid_threads_are_rejected(threads):
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.load(exported_artifacts.exported_artifact("translator"), threads=threads)
    assert excinfo.value.setting == "threads"
