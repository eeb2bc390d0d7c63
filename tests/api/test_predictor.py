"""An artifact run on texts: answers as lines and as JSON, in parts, and what is said of cut texts."""

import json

import pytest

from smelt.api import predict as predicting
from smelt.api.predict import Predictor
from smelt.core.errors import InputError
from smelt.data.splits import Example
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

TEXTS = [Example(text) for text in tiny.SENTENCES]
LONG = Example(" ".join(tiny.SENTENCES * 4))


@pytest.fixture(scope="module")
def translator():
    return exported_artifacts.exported_artifact("translator", "model")


@pytest.fixture(scope="module")
def classifier():
    return exported_artifacts.exported_artifact("classifier", "model")


def _lines(artifact, examples, **wishes):
    return [answer.line for answer in Predictor(artifact, wishes).run(examples)]


def test_answers_are_in_order_for_any_chunk_size(translator, monkeypatch):
    expected = _lines(translator, TEXTS, max_new_tokens=6)
    monkeypatch.setattr(predicting, "_CHUNK_SIZE", 3)
    assert _lines(translator, TEXTS, max_new_tokens=6) == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_number_of_workers_is_a_positive_integer(classifier, workers):
    with raises_code("wrong-value", InputError) as caught:
        Predictor(classifier, {}, workers=workers)
    assert caught.value.setting == "workers"


def test_samples_differ_between_chunks(translator, monkeypatch):
    monkeypatch.setattr(predicting, "_CHUNK_SIZE", 4)
    same = [TEXTS[0]] * 8
    predictor = Predictor(translator, {"do_sample": True, "seed": 1, "max_new_tokens": 12}, batch_size=4)
    lines = [answer.line for answer in predictor.run(same)]
    assert lines[:4] != lines[4:]


def test_json_record_has_text_and_output(translator, classifier):
    (answer,) = Predictor(translator, {"max_new_tokens": 6}).run(TEXTS[:1])
    assert json.loads(answer.json_line) == {"text": TEXTS[0].text, "output": answer.line}
    assert "\n" not in answer.json_line
    pair = Example("a man", text_pair="two dogs")
    first, second = (json.loads(a.json_line) for a in Predictor(classifier, {}).run([TEXTS[0], pair]))
    assert list(first) == ["text", "label", "probabilities"]
    assert (second["text"], second["text_pair"]) == ("a man", "two dogs")
    assert second["label"] in second["probabilities"]
    assert sum(second["probabilities"].values()) == pytest.approx(1)


def test_non_ascii_letters_are_not_escaped_in_records(translator):
    (answer,) = Predictor(translator, {"max_new_tokens": 2}).run([Example("größe 你好")])
    assert '"größe 你好"' in answer.json_line


def test_truncated_texts_warn_once_for_all_chunks(translator, monkeypatch):
    monkeypatch.setattr(predicting, "_CHUNK_SIZE", 2)
    predictor = Predictor(translator, {"max_new_tokens": 2})
    assert len(list(predictor.run([LONG, TEXTS[0], LONG]))) == 3
    [warning] = predictor.warnings
    assert warning.code == "truncated-texts"
    assert all(value in warning.message for value in ("2 of 3 texts", "(40 tokens)"))
    quiet = Predictor(translator, {"max_new_tokens": 2})
    list(quiet.run(TEXTS))
    assert quiet.warnings == []


def test_cpu_graph_warns_if_gpu_was_requested(translator, monkeypatch):
    predictor = Predictor(translator, {"max_new_tokens": 2}, device="cuda")
    monkeypatch.setattr(predicting, "artifact_device", lambda artifact, wanted: "cpu")  # of an ort-cpu graph
    (warning,) = predictor.warnings
    assert warning.code == "other-device"
    assert "--device cuda" in warning.message
    monkeypatch.setattr(predicting, "artifact_device", lambda artifact, wanted: "cuda")
    assert predictor.warnings == []


def test_texts_truncated_by_classifier_warn(classifier):
    predictor = Predictor(classifier, {})
    assert len(list(predictor.run([LONG, TEXTS[0]]))) == 2
    [warning] = predictor.warnings
    assert warning.code == "truncated-texts"
    assert all(value in warning.message for value in ("1 of 2 texts", "(32 tokens)"))


def test_no_texts_open_no_runner(translator, monkeypatch):
    from smelt.runtimes import registry

    monkeypatch.setattr(registry, "open_runner", None)
    assert list(Predictor(translator, {}).run([])) == []


@pytest.mark.parametrize(
    ("step", "batch_size", "options", "expected"),
    [
        ("onnx", 32, {}, (None, 1)),  # one batch: the runtime's own threads
        ("onnx", 4, {}, (2, 2)),
        ("onnx", 1, {}, (1, 4)),
        ("onnx", 1, {"threads": 2}, (2, 2)),
        ("onnx", 1, {"threads": 8}, (8, 1)),
        ("onnx", 1, {"workers": 3}, (1, 3)),
        ("onnx", 1, {"threads": 2, "workers": 1}, (2, 1)),
        ("model", 1, {}, (None, 1)),  # torch has one number of threads for all
        ("model", 1, {"workers": 2}, (None, 2)),
    ],
)
def test_batches_share_the_cores(monkeypatch, step, batch_size, options, expected):
    artifact, opened = exported_artifacts.exported_artifact("translator", step), []
    monkeypatch.setattr("smelt.evaluate.environment.physical_cores", lambda: 4)
    monkeypatch.setattr(
        "smelt.runtimes.registry.open_runner",
        lambda _, threads, __, workers: opened.append((threads, workers)),
    )
    predictor = Predictor(artifact, {}, batch_size=batch_size, **options)
    with pytest.raises(TypeError):  # there is no runner
        list(predictor.run(TEXTS[:8]))
    assert opened == [expected]


def test_conflicting_settings_are_rejected_before_loading(translator):
    with raises_code("settings-conflict", InputError):
        Predictor(translator, {"do_sample": True, "num_beams": 2})
