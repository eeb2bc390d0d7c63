"""One error gives one message, all of them come together, and none is blamed for another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smelt.compress.distill.settings import DistillSettings
from smelt.core.messages import message_codes
from smelt.pipeline.recipe import stages as stage_table
from tests.support.expected_errors import message_locations
from tests.support.standins.stage_stand_ins import RECIPE_HEAD, plan_errors, plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("stand_ins")]


def test_names_of_unreadable_steps_give_no_further_errors(folder: Path) -> None:
    errors = plan_errors(folder, "\n  - {onxn: {}, name: gone}\n  - {prune: {}, from: gone}\nbaseline: gone")
    assert message_locations(errors) == [("unknown-stage", "stages[0].onxn", 5)]
    errors = plan_errors(
        folder, "\n  - {onxn: {}}\n  - prune\nbaseline: onnx\ngates: {bleu: {min: 1, at: nowhere}}"
    )
    assert message_locations(errors) == [
        ("unknown-stage", "stages[0].onxn", 5),
        ("unknown-step", "gates.bleu.at", 8),
    ]


def test_invalid_setting_causes_no_further_errors(folder: Path) -> None:
    """A setting that is wrong has its default while the rest is checked; nothing is concluded from that."""
    assert message_codes(plan_errors(folder, "[{onnx: {target: tensort}}, tensorrt]")) == ["wrong-value"]
    errors = plan_errors(folder, "[{prune: {}, name: a}, {distill: {teacher: b, keep_ratio: 7, x: 1}}]")
    assert message_locations(errors) == [
        ("wrong-value", "stages[1].distill.keep_ratio", 4),
        ("unknown-setting", "stages[1].distill.x", 4),
        ("unknown-step", "stages[1].distill.teacher", 4),
    ]
    head = RECIPE_HEAD.replace("train: train.jsonl", "train: [train.jsonl], columns: {source: 3}")
    assert len(plan_errors(folder, "[prune]", head=head)) == 2  # no word of missing training data, or columns


@pytest.mark.parametrize(("stages", "location", "named"), [
    ("[{onnx: {}, name: onnx-int8}, distill]", ("wrong-model-format", "stages[1].distill", 4),
     ("'onnx-int8'", "of: model.")),
    ("[tensorrt]", ("wrong-model-format", "stages[0].tensorrt", 4), ("'model'", "it: onnx.")),
    ("[prune, quantize, factorize]", ("already-quantized", "stages[2].factorize", 4),
     ("'quantize'", "int8-dynamic", "`from: prune`")),
    ("[quantize, quantize]", ("already-quantized", "stages[1].quantize", 4),
     ("'quantize'", "int8-dynamic", "`from: model`")),
    ("[quantize, {onnx: {target: tensorrt}}]", ("unsupported-scheme", "stages[1].onnx.target", 4),
     ("'quantize'", "`from: model`", "target: ort-cpu, ", "int8-static or fp8 or nvfp4 or int4.")),
    ("[onnx, tensorrt]", ("wrong-target", "stages[1].tensorrt", 4),
     ("'onnx'", "ort-cpu", "`- onnx: {target: tensorrt}`")),
    ("[prune, {onnx: {}, from: prnue}]", ("unknown-step", "stages[1].from", 4),
     ("'prnue'", ": model, prune.", "'prune'?")),
    ("[{prune: {}, from: late}, {prune: {}, name: late}]", ("later-step", "stages[0].from", 4),
     ("'late'", ": model.")),
    ("\n  - {prune: {}, name: a}\n  - {prune: {}, name: a}", ("duplicate-step", "stages[1].name", 6),
     ("'a'", "line 5.")),
    ("[prune]\nbaseline: prnue", ("unknown-step", "baseline", 5), ("'prnue'", ": model, prune.", "'prune'?")),
    ("[prune]\ngates: {bleu: {min: 1, at: prnue}}", ("unknown-step", "gates.bleu.at", 5),
     ("'prnue'", ": model, prune.", "'prune'?")),
    ("[{prune: {keep_ratio: half}}]", ("wrong-value", "stages[0].prune.keep_ratio", 4),
     ("0 and 1", "'half'")),
    ("[{prune: {}, name: first}, {distill: {teacher: frist}}]",
     ("unknown-step", "stages[1].distill.teacher", 4), ("'frist'", ": model, first.", "'first'?")),
    ("[{distill: {teacher: late}}, {prune: {}, name: late}]", ("later-step", "stages[0].distill.teacher", 4),
     ("'late'", ": model.")),
    ("[onnx, {distill: {teacher: onnx}, from: model}]",
     ("wrong-model-format", "stages[1].distill.teacher", 4), ("'onnx'", ": model.")),
    ("[{prune: {keep_ratio: 1.5}}]", ("wrong-value", "stages[0].prune.keep_ratio", 4), ("0 and 1", "1.5")),
    ("[{prune: {kep_ratio: 1}}]", ("unknown-setting", "stages[0].prune.kep_ratio", 4),
     (": keep_ratio, student.", "'keep_ratio'?")),
    ("[{onnx: {target: tensort}}]", ("wrong-value", "stages[0].onnx.target", 4),
     ("'ort-cpu', 'tensorrt', 'openvino'", "'tensort'", "'tensorrt'?")),
])  # fmt: skip
def test_one_mistake_gives_one_message(
    folder: Path, stages: str, location: tuple[str, str, int], named: tuple[str, ...]
) -> None:
    """With the values that were read, and those that would do."""
    [error] = plan_errors(folder, stages)
    assert message_locations([error]) == [location]
    assert [value for value in named if value not in error.message] == []


def test_stages_require_data_and_supported_task(folder: Path) -> None:
    head = "model: model\ntask: text-classification\ndata: {test: labels.csv}\n"
    (folder / "model/config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "model/vocab.txt").touch()
    (folder / "labels.csv").write_text("text,label\na,0\nb,1\n")
    assert message_locations(plan_errors(folder, "[finetune, factorize]", head=head)) == [
        ("missing-data", "stages[0].finetune", 4),
        ("unsupported-task", "stages[1].factorize", 4),
    ]


def test_missing_training_data_next_to_unlabeled_samples_names_train_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model/config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "model/vocab.txt").touch()
    (folder / "labels.csv").write_text("text,label\na,0\nb,1\n")
    (folder / "texts.txt").write_text("a\n")
    monkeypatch.setattr(stage_table.load_stage("distill"), "settings_type", DistillSettings)
    head = "model: model\ntask: text-classification\ndata: {test: labels.csv, unlabeled: texts.txt}\n"
    errors = plan_errors(folder, "[distill: {}, finetune: {}]", head=head)
    [distilled, tuned] = [error for error in errors if error.code == "missing-data"]
    assert "train_on: unlabeled" in distilled.message
    assert "train_on" not in tuned.message  # it has no such setting


def test_errors_of_all_kinds_are_reported_together(folder: Path) -> None:
    (folder / "model/model.safetensors").unlink()
    (folder / "train.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": \n')
    (folder / "test.jsonl").write_text('{"sorce": "a", "target": "b"}\n')
    errors = plan_errors(folder, "\n  - prune: {keep_ratio: 2}\n  - prnue\n  - onnx\nseed: -1")
    assert message_locations(errors) == [
        ("missing-weights", "model", 1),
        ("invalid-json", "data.train", 3),
        ("missing-column", "data.test", 3),
        ("wrong-value", "stages[0].prune.keep_ratio", 5),
        ("unknown-stage", "stages[1].prnue", 6),
        ("wrong-value", "seed", 8),
    ]
    assert "train.jsonl:2: " in errors[1].message
    assert all(name in errors[2].message for name in ("test.jsonl:1: ", "'source'", "'sorce'?"))


def test_step_after_unreadable_step_gives_no_error(folder: Path) -> None:
    errors = plan_errors(folder, "\n  - onxn: {}\n  - tensorrt")
    assert message_locations(errors) == [("unknown-stage", "stages[0].onxn", 5)]


def test_poor_stage_orders_warn(folder: Path) -> None:
    def warned(stages: str) -> list[tuple[str, str | None, int | None]]:
        return [
            (warning.code, warning.step, warning.line) for warning in plan_stages(folder, stages).warnings
        ]

    assert warned("[prune, drop-layers]") == [("poor-order", "drop-layers", 4)]
    assert warned("[factorize, prune, {distill: {student: {decoder_layers: 1}}}]") == [
        ("poor-order", "prune", 4),
        ("poor-order", "distill", 4),
    ]
    assert warned("[sparsify, factorize]") == [("poor-order", "factorize", 4)]
