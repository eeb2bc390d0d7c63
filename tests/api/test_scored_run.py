"""`smelt predict` and `smelt eval` generate as the run did that made the artifact."""

import json
import shutil

import pytest

import smelt
from smelt.api.evaluate import EvaluationOptions, evaluate_artifact
from smelt.api.predict import Predictor, as_examples
from smelt.api.scored_run import generation_with, scored_generation
from smelt.core.artifact import read_artifact
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

BEAMS = {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 4}


@pytest.fixture
def artifact(tmp_path):
    """The artifact of a run that was scored with four beams."""
    run = exported_artifacts.exported_artifact("translator").parents[1]
    folder = tmp_path / "run" / "artifacts" / "onnx"
    shutil.copytree(run / "artifacts" / "onnx", folder)
    report = json.loads((run / "report.json").read_text())
    report["recipe"]["score"]["generation"] = BEAMS
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    return folder


def test_artifact_has_generation_settings_of_its_run(artifact, tmp_path):
    assert scored_generation(artifact, read_artifact(artifact)) == BEAMS
    shutil.copytree(artifact, tmp_path / "copy")
    assert scored_generation(tmp_path / "copy", read_artifact(artifact)) == {}
    (artifact.parents[1] / "report.json").write_text("[]")
    assert scored_generation(artifact, read_artifact(artifact)) == {}


@pytest.mark.parametrize(("options", "expected"), [
    ({"num_beams": None, "max_new_tokens": None, "do_sample": False}, BEAMS),
    ({"max_new_tokens": 9}, BEAMS | {"max_new_tokens": 9}),
    ({"num_beams": 1}, {"num_beams": 1, "max_new_tokens": 4}),
    ({"do_sample": True, "seed": 0}, {"do_sample": True, "seed": 0, "max_new_tokens": 4}),
])  # fmt: skip
def test_search_options_replace_settings_of_run(options, expected):
    assert generation_with(BEAMS, options) == expected


def test_predict_and_eval_equal_outputs_and_scores_of_run(artifact, tmp_path):
    with smelt.load(artifact) as model:
        beams = model.generate(tiny.SENTENCES, **BEAMS)
    predicted = Predictor(artifact, {}).run(as_examples(tiny.SENTENCES, "translation"))
    assert [answer.output for answer in predicted] == beams
    tiny.write_pairs(tmp_path / "test.jsonl", 4)
    notes = []
    scores = evaluate_artifact(
        artifact, str(tmp_path / "test.jsonl"), EvaluationOptions(metrics=["bleu"]), notes.append
    )
    assert "|gen:beam 4|length_penalty:2|" in scores["bleu"]["signature"]
    assert sum("beam 4" in note for note in notes) == 1
    greedy = evaluate_artifact(
        artifact, str(tmp_path / "test.jsonl"), EvaluationOptions(metrics=["bleu"], num_beams=1)
    )
    assert greedy["bleu"]["signature"] != scores["bleu"]["signature"]
