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


def test_answers_come_in_order_however_many_texts_go_at_once(translator, monkeypatch):
    whole = _lines(translator, TEXTS, max_new_tokens=6)
    monkeypatch.setattr(predicting, "_CHUNK_SIZE", 3)
    assert _lines(translator, TEXTS, max_new_tokens=6) == whole
    assert len(set(whole)) > 3


def test_draws_differ_between_parts(translator, monkeypatch):
    monkeypatch.setattr(predicting, "_CHUNK_SIZE", 4)
    same = [TEXTS[0]] * 8
    predictor = Predictor(translator, {"do_sample": True, "seed": 1, "max_new_tokens": 12}, batch_size=4)
    found = [answer.line for answer in predictor.run(same)]
    assert found[:4] != found[4:]


def test_a_record_holds_the_text_and_what_was_made_of_it(translator, classifier):
    (answer,) = Predictor(translator, {"max_new_tokens": 6}).run(TEXTS[:1])
    assert json.loads(answer.json_line) == {"text": TEXTS[0].text, "output": answer.line}
    assert "\n" not in answer.json_line
    pair = Example("a man", text_pair="two dogs")
    first, second = (json.loads(a.json_line) for a in Predictor(classifier, {}).run([TEXTS[0], pair]))
    assert list(first) == ["text", "label", "probabilities"]
    assert (second["text"], second["text_b"]) == ("a man", "two dogs")
    assert second["label"] in second["probabilities"]
    assert sum(second["probabilities"].values()) == pytest.approx(1)


def test_letters_of_every_script_stay_letters_in_a_record(translator):
    (answer,) = Predictor(translator, {"max_new_tokens": 2}).run([Example("größe 你好")])
    assert '"größe 你好"' in answer.json_line


def test_texts_that_were_cut_are_told_once_for_all_parts(translator, monkeypatch):
    monkeypatch.setattr(predicting, "_CHUNK_SIZE", 2)
    predictor = Predictor(translator, {"max_new_tokens": 2})
    assert len(list(predictor.run([LONG, TEXTS[0], LONG]))) == 3
    [found] = predictor.warnings
    assert found.code == "truncated-texts"
    assert all(value in found.message for value in ("2 of 3 texts", "(40 tokens)"))
    quiet = Predictor(translator, {"max_new_tokens": 2})
    list(quiet.run(TEXTS))
    assert quiet.warnings == []


def test_a_graph_for_the_processor_says_so_where_a_gpu_was_asked_for(translator, monkeypatch):
    predictor = Predictor(translator, {"max_new_tokens": 2}, device="cuda")
    monkeypatch.setattr(predicting, "artifact_device", lambda artifact, wanted: "cpu")  # of an ort-cpu graph
    (warning,) = predictor.warnings
    assert warning.code == "other-device"
    assert "--device cuda" in warning.message
    monkeypatch.setattr(predicting, "artifact_device", lambda artifact, wanted: "cuda")
    assert predictor.warnings == []


def test_texts_that_a_classifier_cut_are_told(classifier):
    predictor = Predictor(classifier, {})
    assert len(list(predictor.run([LONG, TEXTS[0]]))) == 2
    [found] = predictor.warnings
    assert found.code == "truncated-texts"
    assert all(value in found.message for value in ("1 of 2 texts", "(32 tokens)"))


def test_nothing_is_opened_for_no_texts(translator, monkeypatch):
    from smelt.runtimes import registry

    monkeypatch.setattr(registry, "open_runner", None)
    assert list(Predictor(translator, {}).run([])) == []


def test_settings_that_do_not_fit_are_refused_before_anything_is_opened(translator):
    with raises_code("settings-conflict", InputError):
        Predictor(translator, {"do_sample": True, "num_beams": 2})
