"""A model that marks answers is trained, made smaller, exported, packaged, and asked questions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import smelt
from smelt.export.package.standalone.packaged_model import PackagedModel
from tests.support import harness
from tests.support.expected_errors import command_error, error_codes, raises_code
from tests.support.models import every_family, masked, questions

CONFIG = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 40,
}  # fmt: skip
RECIPE = """
model: {config: bert.json, tokenizer: {train: wordpiece, vocab_size: 120}}
task: question-answering
data: {train: train.jsonl, validation: test.jsonl, test: test.jsonl}
stages:
  - finetune: {epochs: 8, batch_size: 16, learning_rate: 5.0e-3}
    name: tuned
  - prune: {targets: [heads, ffn], keep_ratio: 0.5}
  - factorize: {keep_ratio: 0.8}
  - distill:
      teacher: tuned
      losses: {logits: 1.0, labels: 0.5, hidden_states: 1.0}
      max_steps: 20
      batch_size: 16
      learning_rate: 2.0e-3
    name: small
  - onnx: {target: ort-cpu}
    name: onnx-fp32
  - quantize: {scheme: int8-dynamic}
    from: small
    name: int8
  - onnx: {target: ort-cpu}
    name: onnx-int8
baseline: tuned
score: {quality: [token_f1, exact_match, "own:count_right"], latency: false}
"""
OWN_METRIC = """
def count_right(predictions, references, sources):
    assert all(len(source) == 2 for source in sources)
    return [float(text in texts) for text, texts in zip(predictions, references)]
"""
LONG = "Ada is at home. " * 20 + "Grace lives in Oslo. " + "Ada is at home. " * 20
PAIRS = [
    ("Which city?", "Grace lives in Buenos Aires."), ("Which city?", "Ada is at home."),
    ("Which city?", "In New York it rains, says Alan."), ("Which city?", LONG),
    ("Which city?", "\U0001f469\u200d\U0001f4bb Ada lives in Rome. e\u0301"),
    ("Which " * 60, "In Oslo it rains."),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "bert.json").write_text(json.dumps(CONFIG))
    (home / "own.py").write_text(OWN_METRIC)
    questions.write_questions(home / "train.jsonl", 200)
    questions.write_questions(home / "test.jsonl", 60, seed=1)
    (home / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return home


@pytest.fixture(scope="module")
def package(home):
    result = harness.smelt("package", home / "run" / "artifacts" / "onnx-int8", "--out", home / "package")
    assert result.exit_code == 0, result.output
    return home / "package"


def steps_of(folder: Path) -> dict[str, dict]:
    return {step["name"]: step for step in json.loads((folder / "report.json").read_text())["steps"]}


def test_every_step_answers_questions(home):
    steps = steps_of(home / "run")
    for name in ("tuned", "small", "onnx-fp32", "onnx-int8"):
        quality = steps[name]["quality"]
        assert quality["token_f1"]["value"] > 85, name
        assert {quality[name]["n"] for name in ("token_f1", "exact_match", "own:count_right")} == {60}
        assert "squad v2.0" in quality["token_f1"]["signature"]
        assert 20 < quality["exact_match"]["chance"] < 50
    small, fp32 = steps["small"]["quality"], steps["onnx-fp32"]["quality"]
    assert fp32["token_f1"]["value"] == small["token_f1"]["value"]
    assert steps["small"]["parameters"] < steps["tuned"]["parameters"]
    assert steps["onnx-int8"]["against_baseline"]["token_f1"]["n"] == 60
    assert steps["onnx-int8"]["agreement"]["equal"] > 80


def test_exported_logits_equal_transformers_with_padding(home):
    folder = home / "run" / "artifacts" / "small"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["Which city?"] * 2, [PAIRS[0][1], "Ada"], padding=True, return_tensors="pt")
    with torch.no_grad():
        from smelt.models.checkpoint import load_model

        expected = load_model(folder)[0](**inputs)
    import onnxruntime

    session = onnxruntime.InferenceSession(home / "run" / "artifacts" / "onnx-fp32" / "model.onnx")
    (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    mask = inputs["attention_mask"].bool()
    for side, values in enumerate((expected.start_logits, expected.end_logits)):
        torch.testing.assert_close(
            torch.from_numpy(logits[..., side])[mask], values[mask], rtol=1e-4, atol=1e-4
        )


def test_all_runtimes_give_the_same_answers(home):
    results = []
    for step in ("small", "onnx-fp32"):
        with smelt.load(home / "run" / "artifacts" / step) as model:
            with pytest.warns(smelt.core.errors.TruncationWarning):
                results.append(model.predict(PAIRS, batch_size=3))
            assert model.truncated == 1
            with raises_code("missing-context"):
                model.predict(["Which city?"])
    torch_answers, answers = ([(a.answer, a.start, a.end) for a in row] for row in results)
    assert torch_answers == answers
    assert [a.answer for a in results[1][:3]] == ["Buenos Aires", "", "New York"]
    assert results[1][3].answer.endswith("Oslo")  # in the third window or later
    for answer, (_, context) in zip(results[1], PAIRS, strict=True):
        assert context[answer.start : answer.end] == answer.answer
    assert results[1][4].answer == "Rome"


def test_predict_reads_pairs_rows_and_squad(home, tmp_path):
    artifact = home / "run" / "artifacts" / "onnx-fp32"
    lines = harness.smelt("predict", artifact, *("\t".join(pair) for pair in PAIRS[:3])).output.splitlines()
    assert lines[0].startswith("Buenos Aires [15:27 ")
    assert lines[1].startswith("[")
    rows = [{"question": question, "context": context} for question, context in PAIRS[:3]]
    questions.write_lines(tmp_path / "rows.jsonl", rows)
    command = ("predict", artifact, "--data")
    assert harness.smelt(*command, tmp_path / "rows.jsonl").output.splitlines() == lines
    qas = [{"id": "1", "question": PAIRS[0][0]}]
    article = {"title": "T", "paragraphs": [{"context": context, "qas": qas} for _, context in PAIRS[:3]]}
    (tmp_path / "squad.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    assert harness.smelt(*command, tmp_path / "squad.json").output.splitlines() == lines
    result = harness.smelt(*command, tmp_path / "squad.json", "--json").output.splitlines()
    assert json.loads(result[0])["answer"] == "Buenos Aires"
    questions.write_lines(tmp_path / "rows.jsonl", [{"q": "Which city?", "text": PAIRS[0][1]}])
    columns = ("--column", "question=q", "--column", "context=text")
    assert harness.smelt(*command, tmp_path / "rows.jsonl", *columns).output.splitlines() == lines[:1]
    assert command_error(harness.smelt("predict", artifact, "Which city?")).code == "missing-context"


def test_eval_of_answerable_questions_has_rules_of_squad_1(home, tmp_path):
    rows = [json.loads(line) for line in (home / "test.jsonl").read_text().splitlines()]
    answerable = [row for row in rows if row["answers"]["text"]]
    questions.write_lines(tmp_path / "a.jsonl", answerable)
    artifact = home / "run" / "artifacts" / "onnx-fp32"
    scores = {}
    for path in (tmp_path / "a.jsonl", home / "test.jsonl"):
        result = harness.smelt("eval", artifact, "--data", path, "--json")
        scores[path.name] = json.loads(result.output)["exact_match"]
    assert "squad v1.1" in scores["a.jsonl"]["signature"]
    quality = steps_of(home / "run")["onnx-fp32"]["quality"]
    assert scores["test.jsonl"]["value"] == quality["exact_match"]["value"]


def test_package_answers_the_same(home, package):
    with smelt.load(home / "run" / "artifacts" / "onnx-int8") as model, pytest.warns():
        expected = model.predict(PAIRS, batch_size=len(PAIRS))
    served = PackagedModel(package, "QuestionAnswerer", threads=1)
    inputs = [{"question": question, "context": context} for question, context in PAIRS[:3]]
    inputs += [list(pair) for pair in PAIRS[3:]]
    results = served.answer([served.read(value) for value in inputs])
    assert [(r["answer"], r["start"], r["end"]) for r in results] == [
        (a.answer, a.start, a.end) for a in expected
    ]
    assert [r["score"] for r in results] == pytest.approx([a.score for a in expected], abs=1e-5)
    assert served.cut == 1
    (forced,) = served.model(PAIRS[1:2], may_be_unanswerable=False)
    assert forced["answer"] == PAIRS[1][1][forced["start"] : forced["end"]] != ""
    command = [sys.executable, package / "infer.py", "\t".join(PAIRS[0])]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert line == harness.smelt("predict", home / "run" / "artifacts" / "onnx-int8", command[-1]).output
    result = subprocess.run([*command[:-1], "Which city?"], capture_output=True, check=False)
    assert result.returncode == 2
    for value in ("Which city?", ["a"], {"question": "a"}, {"question": "a", "context": 3}, ["a", "\ud800"]):
        with pytest.raises(ValueError):  # noqa: PT011 - the service answers 422 to any
            served.read(value)


@pytest.mark.parametrize("source", ["encoder", "classifier"])
def test_encoder_gets_head_for_start_and_end(tmp_path, source):
    if source == "encoder":
        masked.write_model(tmp_path / "m")
    else:
        every_family.make_model(tmp_path / "m", "bert")
    questions.write_rows(tmp_path / "r.jsonl")
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: question-answering\ndata: {train: r.jsonl, test: r.jsonl}\n"
        "stages:\n  - finetune: {max_steps: 2, batch_size: 4}\nscore: {latency: false}\n"
    )
    result = harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "artifacts" / "finetune"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForQuestionAnswering"]
    assert transformers.AutoModelForQuestionAnswering.from_pretrained(folder).qa_outputs.out_features == 2
    assert [w["code"] for w in steps_of(tmp_path / "run")["model"]["warnings"]] == ["new-classifier"]


@pytest.mark.parametrize(("stage", "settings"), [
    ("distill", "augmentation: {model: m}"), ("distill", "cache_logits: {}"),
    ("distill", "train_on: unlabeled"), ("distill", "teacher: [teacher, teacher2]"),
    ("finetune", "class_weights: balanced"), ("finetune", "sampling: balanced"),
    ("finetune", "packing: true"),
])  # fmt: skip
def test_plan_refuses_settings_for_other_samples(tmp_path, stage, settings):
    masked.write_model(tmp_path / "m")
    for name in ("qa", "teacher", "teacher2"):
        questions.write_model(tmp_path / name)
    questions.write_rows(tmp_path / "r.jsonl")
    unlabeled = "unlabeled: r.jsonl, " if "unlabeled" in settings else ""
    losses = "losses: {logits: 1.0, labels: 0.0}, " if stage == "distill" else ""
    (tmp_path / "r.yaml").write_text(
        f"model: qa\ntask: question-answering\ndata: {{{unlabeled}train: r.jsonl, test: r.jsonl}}\n"
        f"stages:\n  - {stage}: {{{losses}{settings}}}\n"
    )
    codes = error_codes(command_error(harness.smelt("plan", tmp_path / "r.yaml")))
    assert {"does-not-fit-task", "unsupported-task", "several-teachers"} & {*codes}, codes


def test_calibration_needs_no_answers(tmp_path):
    questions.write_model(tmp_path / "m")
    questions.write_rows(tmp_path / "r.jsonl")
    questions.write_lines(tmp_path / "c.jsonl", [{"question": "what ?", "context": "two dogs"}])
    recipe = (
        "model: m\ntask: question-answering\ndata: {calibration: c.jsonl, test: r.jsonl}\n"
        "score: {latency: false}\nstages:\n"
    )
    (tmp_path / "r.yaml").write_text(recipe + "  - quantize: {scheme: int8-static, calibration_samples: 1}\n")
    result = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output
    (tmp_path / "r.yaml").write_text(f"{recipe}  - prune: {{targets: [ffn], importance: taylor}}\n")
    assert "missing-labels" in error_codes(command_error(harness.smelt("plan", tmp_path / "r.yaml")))


def test_init_recognizes_task_from_model_and_from_rows(tmp_path):
    questions.write_model(tmp_path / "qa")
    masked.write_model(tmp_path / "encoder")
    questions.write_rows(tmp_path / "train.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    paragraphs = [{"context": row["context"], "qas": [
        {"id": str(i), "question": row["question"], "is_impossible": not row["answers"]["text"],
         "answers": [{"text": t, "answer_start": s} for t, s in zip(*row["answers"].values(), strict=True)]},
    ]} for i, row in enumerate(rows)]  # fmt: skip
    (tmp_path / "train.jsonl").unlink()
    for split in ("train", "dev"):
        squad = {"version": "v2.0", "data": [{"title": "T", "paragraphs": paragraphs}]}
        (tmp_path / f"{split}-v2.0.json").write_text(json.dumps(squad))
    data = ("--data", tmp_path / "train-v2.0.json", "--data", tmp_path / "dev-v2.0.json")
    for model, first_step in (("qa", "prune"), ("encoder", "finetune")):
        result = harness.smelt("init", tmp_path / model, *data, "--out", tmp_path / f"{model}.yaml")
        assert result.exit_code == 0, result.output
        text = (tmp_path / f"{model}.yaml").read_text()
        assert "task: question-answering\n" in text
        assert next(line for line in text.splitlines() if line.startswith("  - ")).startswith(
            f"  - {first_step}:"
        )
        assert harness.smelt("plan", tmp_path / f"{model}.yaml").exit_code == 0


def test_example_of_huggingface_package_answers_a_question(home, capsys, monkeypatch):
    folder = home / "huggingface"
    step = home / "run" / "artifacts" / "tuned"
    result = harness.smelt("package", step, "--format", "huggingface", "--out", folder)
    assert result.exit_code == 0, result.output
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    exec(code.replace("Where does Ada live?", "Which city?").replace("London", "Rome"), {})
    assert capsys.readouterr().out.strip().lower() == "rome"
