"""Targets that a teacher wrote: which rows get them, of what candidates, and never twice."""

import pytest
import sacrebleu

import smelt
from smelt.compress.distill import stage
from smelt.compress.distill.settings import DistillSettings, SequenceSettings
from smelt.compress.distill.stage import Distill, closest_by_bleu, count_targets, generate_targets
from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import tiny


@pytest.fixture
def rows(tmp_path):
    return tiny.read_pairs(tmp_path)


@pytest.fixture
def teacher(tmp_path):
    return tiny.as_artifact(tiny.write_marian(tmp_path / "teacher"))


def transformers_texts(folder, texts, **how):
    import torch
    from transformers import AutoTokenizer, MarianMTModel

    model, words = MarianMTModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    outputs = []
    for text in texts:  # one by one: no padding
        with torch.no_grad():
            ids = model.generate(**words(text, return_tensors="pt"), max_new_tokens=6, **how)
        outputs.append(words.batch_decode(ids, skip_special_tokens=True))
    return outputs


def test_targets_are_best_beams_of_teacher(tmp_path, teacher, rows):
    ctx = harness.make_context(tmp_path / "out", data=rows)
    targets = generate_targets(teacher, SequenceSettings(num_beams=2, max_new_tokens=6), ctx)
    texts = [e.text for e in rows.examples]
    expected = [best for (best,) in transformers_texts(teacher.path, texts, num_beams=2)]
    assert [(e.text, *e.references) for e in targets.examples] == list(zip(texts, expected, strict=True))
    assert ctx.details["sequence_level"] == {"written_by_the_teacher": len(rows), "with_their_own_target": 0}


def test_best_of_selects_candidate_closest_to_reference(tmp_path, teacher, rows):
    ctx = harness.make_context(tmp_path / "out", data=rows)
    settings = SequenceSettings(num_beams=4, best_of=4, max_new_tokens=6)
    targets = generate_targets(teacher, settings, ctx)
    texts = [e.text for e in rows.examples]
    lists = transformers_texts(teacher.path, texts, num_beams=4, num_return_sequences=4)
    for example, row, candidates in zip(targets.examples, rows.examples, lists, strict=True):
        scores = [sacrebleu.sentence_bleu(text, list(row.references)).score for text in candidates]
        assert example.references == (candidates[scores.index(max(scores))],)
    assert closest_by_bleu(["a man walks"], ["a man", "a man walks", "a man runs"]) == "a man walks"


def test_closest_chinese_candidate_is_selected_by_characters():
    candidates = ["天气很好。", "两只狗在草地上跑。"]
    assert closest_by_bleu(["两只狗在草地上奔跑。"], candidates, "zh") == candidates[1]


@pytest.mark.parametrize(
    ("rows", "mix", "expected"),
    [(100, 0.0, (0, 100)), (100, 0.5, (100, 100)), (100, 0.2, (25, 100)), (100, 0.8, (100, 25))],
)
def test_original_ratio_is_fraction_of_all_samples(rows, mix, expected):
    assert count_targets(rows, rows, mix) == expected


def test_original_targets_are_mixed_in_and_empty_outputs_dropped(tmp_path, teacher, rows, monkeypatch):
    texts = [f"text {n}" for n in range(len(rows))]
    texts[0] = ""
    monkeypatch.setattr(stage, "_generate", lambda *args: texts)
    ctx = harness.make_context(tmp_path / "out", data=rows)
    targets = generate_targets(teacher, SequenceSettings(original_ratio=0.5), ctx)
    original_examples = [e for e in targets.examples if e in rows.examples]
    assert (len(original_examples), len(targets)) == (len(rows) - 1, 2 * len(rows) - 2)
    (warning,) = ctx.warnings
    assert warning.code == "empty-teacher-outputs"
    assert f"1 of {len(rows)}" in warning.message


def test_second_run_reuses_generated_targets(tmp_path, monkeypatch):
    tiny.write_marian(tmp_path / "model")
    tiny.write_pairs(tmp_path / "rows.jsonl")
    recipe = tmp_path / "recipe.yaml"

    data = "{train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}"
    level = "{num_beams: 2, max_new_tokens: 4, original_ratio: 0.5}"
    distill_options = f"sequence_level: {level}, losses: {{logits: 0, labels: 1}}"

    def write(rate):
        recipe.write_text(
            f"model: model\ntask: translation\ndata: {data}\nthreads: 1\n"
            "score: {latency: false, quality: [bleu], generation: {max_new_tokens: 4}}\nstages:\n"
            f"  - distill: {{{distill_options}, max_steps: 1, num_evals: 0, precision: fp32,"
            f" learning_rate: {rate}}}\n"
        )

    decoded, real = [], stage._generate
    monkeypatch.setattr(stage, "_generate", lambda *args: decoded.append(1) or real(*args))
    for rate in (1e-4, 2e-4):
        write(rate)
        result = smelt.run(recipe, out=tmp_path / "run", store=tmp_path / "store", quiet=True)
        assert [step["status"] for step in result.report["steps"]][-1] == "done"
    assert decoded == [1]
    harness.smelt("store", "check", "--store", tmp_path / "store", code=0)


@pytest.mark.parametrize(("options", "code"), [
    ({"num_beams": 3, "best_of": 4}, "too-few-beams"),
    ({"num_beams": 1, "length_penalty": 1.0}, "unused-setting"), ({"original_ratio": 1}, "less_than"),
])  # fmt: skip
def test_invalid_sequence_settings_are_rejected(options, code):
    with raises_setting_codes(code):
        SequenceSettings.model_validate(options)


def test_sequence_level_is_rejected_for_classification():
    settings = DistillSettings(sequence_level={"num_beams": 2})
    (error,) = Distill.check_rows(settings, "text-classification", {})
    assert (error.setting, error.code) == ("sequence_level", "does-not-fit-task")
    assert Distill.check_rows(settings, "translation", {}) == []


def test_onnx_teacher_can_generate_targets(tmp_path, monkeypatch):
    tiny.write_marian(tmp_path / "model", encoder_layers=1, decoder_layers=1)
    tiny.write_pairs(tmp_path / "rows.jsonl")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: model\ntask: translation\nthreads: 1\n"
        "data: {train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}\n"
        "score: {latency: false, quality: [bleu], generation: {max_new_tokens: 4}}\nstages:\n"
        "  - onnx: {}\n    name: fast\n"
        "  - distill: {sequence_level: {num_beams: 2, max_new_tokens: 6, generator: fast}, max_steps: 1,"
        " num_evals: 0}\n"
        "    from: model\n"
    )
    calls, real = [], stage._generate

    def decode(writer, examples, settings, ctx):
        calls.append((writer.format, real(writer, examples, settings, ctx)))
        assert calls[0][1] == real(ctx.ancestors["model"], examples, settings, ctx)
        return calls[0][1]

    monkeypatch.setattr(stage, "_generate", decode)
    result = smelt.run(recipe, out=tmp_path / "run", quiet=True)
    assert result.exit_code == 0, [step["error"] for step in result.report["steps"]]
    assert calls[0][0] == "onnx"
    recipe.write_text(recipe.read_text().replace("generator: fast", "generator: fats"))
    with raises_code("unknown-step", InputError) as caught:
        load_plan(recipe)
    (error,) = caught.value.messages
    assert error.setting == "stages[1].distill.sequence_level.generator"
    assert all(words in error.message for words in ("'fats'", "model, fast"))
