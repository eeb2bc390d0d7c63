"""One mistake gives one message, all of them come together, and none is blamed for another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning import HEAD, mistakes, plan

pytest_plugins = ["planning"]
pytestmark = pytest.mark.usefixtures("stand_ins")


def test_names_that_only_an_unreadable_step_may_have_are_not_blamed(folder: Path) -> None:
    [found] = mistakes(folder, "\n  - {onxn: {}, name: gone}\n  - {prune: {}, from: gone}\nbaseline: gone")
    assert "unknown stage 'onxn'" in found
    found = mistakes(
        folder, "\n  - {onxn: {}}\n  - prune\nbaseline: onnx\ngates: {bleu: {min: 1, at: nowhere}}"
    )
    assert len(found) == 2
    assert "no step 'nowhere'" in found[1]


def test_wrong_setting_does_not_speak_for_others(folder: Path) -> None:
    """A setting that is wrong has its default while the rest is checked; nothing is concluded from that."""
    assert len(mistakes(folder, "[{onnx: {target: tensort}}, tensorrt]")) == 1
    found = mistakes(folder, "[{prune: {}, name: a}, {distill: {teacher: b, keep: 7, x: 1}}]")
    assert [line.split(":")[1] for line in found] == [
        " stages[1].distill.keep",
        " stages[1].distill.x",
        " stages[1].distill.teacher",
    ]
    head = HEAD.replace("train: train.jsonl", "train: [train.jsonl], columns: {source: 3}")
    assert len(mistakes(folder, "[prune]", head=head)) == 2  # no word of missing training data, or columns


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "[{onnx: {}, name: onnx-int8}, distill]",
            "4: stages[1].distill: distill works on torch models, but its parent step 'onnx-int8' gives onnx;"
            " move it before 'onnx-int8', or give `from:` with one of: model.",
        ),
        (
            "[tensorrt]",
            "4: stages[0].tensorrt: tensorrt works on onnx models, but its parent step 'model' gives torch;"
            " put one of these before it: onnx.",
        ),
        (
            "[prune, quantize, factorize]",
            "4: stages[2].factorize: factorize cannot work after 'quantize', which left int8-dynamic codes;"
            " move it before 'quantize', or give `from: prune`.",
        ),
        (
            "[quantize, quantize]",
            "4: stages[1].quantize: quantize cannot work after 'quantize', which left int8-dynamic codes;"
            " move it before 'quantize', or give `from: model`.",
        ),
        (
            "[quantize, {onnx: {target: tensorrt}}]",
            "4: stages[1].onnx.target: TensorRT cannot run the dynamic int8 of 'quantize'; give `from: model`,"  # noqa: E501
            " or target: ort-cpu, or quantize with int8-static or int4.",
        ),
        (
            "[onnx, tensorrt]",
            "4: stages[1].tensorrt: tensorrt reads graphs with target tensorrt, but 'onnx' has target ort-cpu;"  # noqa: E501
            " add `- onnx: {target: tensorrt}` before it, or give `from:` such a step.",
        ),
        (
            "[prune, {onnx: {}, from: prnue}]",
            "4: stages[1].from: no step 'prnue'. Earlier steps: model, prune. Did you mean 'prune'?",
        ),
        (
            "[{prune: {}, from: late}, {prune: {}, name: late}]",
            "4: stages[0].from: 'late' is not an earlier step. Earlier steps: model.",
        ),
        (
            "\n  - {prune: {}, name: a}\n  - {prune: {}, name: a}",
            "6: stages[1].name: 'a' is already the name of the step in line 5.",
        ),
        (
            "[prune]\nbaseline: prnue",
            "5: baseline: no step 'prnue'. Known: model, prune. Did you mean 'prune'?",
        ),
        (
            "[prune]\ngates: {bleu: {min: 1, at: prnue}}",
            "5: gates.bleu.at: no step 'prnue'. Known: model, prune. Did you mean 'prune'?",
        ),
        (
            "[{prune: {keep: half}}]",
            "4: stages[0].prune.keep: expected a number between 0 and 1, read 'half'.",
        ),
        (
            "[{prune: {}, name: first}, {distill: {teacher: frist}}]",
            "4: stages[1].distill.teacher: no earlier step 'frist'. Those are: model, first. Did you mean 'first'?",  # noqa: E501
        ),
        (
            "[{distill: {teacher: late}}, {prune: {}, name: late}]",
            "4: stages[0].distill.teacher: no earlier step 'late'. Those are: model.",
        ),
        (
            "[onnx, {distill: {teacher: onnx}, from: model}]",
            "4: stages[1].distill.teacher: 'onnx' gives onnx, and a torch model is wanted. Those are: model.",
        ),
        ("[{prune: {keep: 1.5}}]", "4: stages[0].prune.keep: expected a number between 0 and 1, read 1.5."),
        (
            "[{prune: {kep: 1}}]",
            "4: stages[0].prune.kep: unknown; known here: keep, student. Did you mean 'keep'?",
        ),
        (
            "[{onnx: {target: tensort}}]",
            "4: stages[0].onnx.target: expected one of 'ort-cpu', 'tensorrt', 'openvino', read 'tensort'. Did you mean 'tensorrt'?",  # noqa: E501
        ),
    ],
)
def test_one_mistake_gives_one_message(folder: Path, stages: str, message: str) -> None:
    assert mistakes(folder, stages) == [message]


def test_stages_need_their_data_and_their_task(folder: Path) -> None:
    head = "model: model\ntask: text-classification\ndata: {test: labels.csv}\n"
    (folder / "model/config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "model/vocab.txt").touch()
    (folder / "labels.csv").write_text("text,label\na,0\nb,1\n")
    assert mistakes(folder, "[finetune, factorize]", head=head) == [
        "4: stages[0].finetune: finetune needs train data; name a file with data: {train: FILE}.",
        "4: stages[1].factorize: factorize does not work on text-classification; it works on translation.",
    ]


def test_mistakes_of_all_kinds_come_together(folder: Path) -> None:
    (folder / "model/model.safetensors").unlink()
    (folder / "train.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": \n')
    (folder / "test.jsonl").write_text('{"sorce": "a", "target": "b"}\n')
    found = mistakes(folder, "\n  - prune: {keep: 2}\n  - prnue\n  - onnx\nseed: -1")
    assert [line.split(":")[0] for line in found] == ["1", "3", "3", "5", "6", "8"]
    assert "no weights in this folder" in found[0]
    assert "train.jsonl:2: broken JSON" in found[1]
    assert "test.jsonl:1: no column 'source'; there are: sorce, target. Did you mean 'sorce'?" in found[2]
    assert "expected a number between 0 and 1, read 2" in found[3]
    assert "unknown stage 'prnue'" in found[4]
    assert "seed: expected a whole number" in found[5]


def test_a_step_after_an_unreadable_one_is_not_blamed(folder: Path) -> None:
    [found] = mistakes(folder, "\n  - onxn: {}\n  - tensorrt")
    assert "unknown stage 'onxn'" in found


def test_poor_orders_are_warned_about(folder: Path) -> None:
    deep = plan(folder, "[prune, depth]")
    assert deep.warnings == (
        "line 4: depth: layers that go after prune take part of that work with them; put depth first.",
    )
    made = plan(folder, "[factorize, prune, {distill: {student: {decoder_layers: 1}}}]")
    assert made.warnings == (
        "line 4: prune: pruning after factorize finds few whole matrices; prune first.",
        "line 4: distill: choosing a student's layers after factorize and prune throws part of that work away;"  # noqa: E501
        " distil to fewer layers first.",
    )
    made = plan(folder, "[sparsify, factorize]")
    assert made.warnings == (
        "line 4: factorize: two thin matrices are dense; the zeros of sparsify are lost.",
    )
