"""Plans: the tree of steps, what is checked before work starts, and how it is shown."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field
from safetensors.numpy import save_file

from smelt.cli import main
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.stage import Settings, StepName
from smelt.look import machine
from smelt.plan.load import load_plan
from smelt.plan.plan import Plan
from smelt.plan.printed import describe_plan
from smelt.recipe import stage_table

BOTH = frozenset({"translation", "text-classification"})


class _TrainSettings(Settings):
    keep: float = Field(default=0.5, ge=0, le=1)
    student: dict[str, int] | None = None


class _DistillSettings(_TrainSettings):
    teacher: StepName = "model"


class _OnnxSettings(Settings):
    target: Literal["ort-cpu", "tensorrt"] = "ort-cpu"


class _QuantizeSettings(_TrainSettings):
    def schemes(self) -> tuple[str, ...]:
        return ("int8-dynamic",)


def _stand_in(word: str) -> Any:
    """A class with the contract of a stage, so that these tests are about plans alone."""
    trains = word in ("finetune", "distill", "prune")
    settings = {"onnx": _OnnxSettings, "distill": _DistillSettings, "quantize": _QuantizeSettings}
    return type(
        word,
        (),
        {
            "name": word,
            "accepts": frozenset({"onnx" if word == "tensorrt" else "torch"}),
            "produces": word if word in ("onnx", "tensorrt") else "torch",
            "needs": frozenset({"train"} if trains else {"tensorrt"} if word == "tensorrt" else ()),
            "needs_float": word in ("prune", "factorize", "quantize"),
            "tasks": frozenset({"translation"}) if word == "factorize" else BOTH,
            "settings_type": settings.get(word, _TrainSettings),
        },
    )


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {word: _stand_in(word) for word in stage_table.TABLE}
    monkeypatch.setattr(stage_table, "load_stage", table.__getitem__)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)


def prepare(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "marian"}))
    save_file({"w": np.ones(2, np.float32)}, model / "model.safetensors")
    for name in ("source.spm", "target.spm", "vocab.json"):
        (model / name).touch()
    for name, rows in {"train": 120, "test": 101}.items():
        start = "a" if name == "train" else "c"
        lines = "".join(
            json.dumps({"source": f"{start} {i}", "target": f"b {i}"}) + "\n" for i in range(rows)
        )
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


HEAD = "model: model\ntask: translation\ndata: {train: train.jsonl, test: test.jsonl}\n"


def plan(folder: Path, stages: str, *overrides: str, head: str = HEAD, until: str | None = None) -> Plan:
    path = folder / "recipe.yaml"
    path.write_text(f"{head}stages: {stages}\n")
    return load_plan(path, overrides, until)


def mistakes(folder: Path, stages: str, *overrides: str, **more: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        plan(folder, stages, *overrides, **more)
    assert caught.value.exit_code == 2
    return [line.removeprefix(f"{folder / 'recipe.yaml'}:") for line in str(caught.value).splitlines()]


TREE = """
  - distill: {student: {decoder_layers: 1}}
  - prune: {keep: 0.25}
  - prune
  - factorize:
    name: small
  - quantize: {}
  - onnx: {}
    name: onnx-int8
  - onnx: {target: tensorrt}
    from: small
  - tensorrt: {}
    optional: true
gates:
  bleu: {max_drop: 1.0, min: 20}
  size_bytes: {max: 1_000_000, at: [small]}"""


def test_steps_form_a_tree_with_unique_names(folder: Path) -> None:
    made = plan(folder, TREE)
    assert [(s.name, s.stage, s.parent) for s in made.steps] == [
        ("distill", "distill", "model"),
        ("prune", "prune", "distill"),
        ("prune-2", "prune", "prune"),
        ("small", "factorize", "prune-2"),
        ("quantize", "quantize", "small"),
        ("onnx-int8", "onnx", "quantize"),
        ("onnx", "onnx", "small"),
        ("tensorrt", "tensorrt", "onnx"),
    ]
    assert made.step("prune").settings.model_dump()["keep"] == 0.25
    assert made.step("onnx").format == "onnx"
    assert [s.name for s in made.children("small")] == ["quantize", "onnx"]
    assert made.model_folder == folder / "model"
    assert made.warnings == ()


def test_automatic_names_keep_clear_of_given_ones(folder: Path) -> None:
    made = plan(folder, "[prune, {prune: {}, name: prune-2}, prune]")
    assert [s.name for s in made.steps] == ["prune", "prune-2", "prune-3"]


def test_gates_are_on_the_last_step_of_each_branch_that_can_run(folder: Path) -> None:
    made = plan(folder, TREE)
    assert [(g.metric, g.kind, g.limit, g.at) for g in made.gates] == [
        ("bleu", "max_drop", 1.0, ("onnx-int8", "onnx")),
        ("bleu", "min", 20.0, ("onnx-int8", "onnx")),
        ("size_bytes", "max", 1e6, ("small",)),
    ]
    assert [g.metric for g in made.gates_of("small")] == ["size_bytes"]


def test_confidence_of_a_gate_is_planned_and_shown(folder: Path) -> None:
    made = plan(folder, "[]\ngates: {bleu: {max_drop: 1, confidence: 0.95}, chrf: {min: 9}}")
    assert [gate.confidence for gate in made.gates] == [0.95, None]
    said = describe_plan(made)
    assert "bleu: drop at most 1, with confidence 0.95 at model" in said
    assert "chrf: at least 9 at model" in said


def test_without_stages_the_gate_is_on_the_model(folder: Path) -> None:
    assert plan(folder, "[]\ngates: {bleu: {min: 1}}").gates[0].at == ("model",)


def test_until_keeps_what_the_step_needs(folder: Path) -> None:
    made = plan(folder, TREE, until="onnx")
    assert [s.name for s in made.steps] == ["distill", "prune", "prune-2", "small", "onnx"]
    assert made.left_out == ("quantize", "onnx-int8", "tensorrt")
    assert made.gates[0].at == ("onnx",)
    assert plan(folder, TREE, until="model").steps == ()
    assert mistakes(folder, TREE, until="onix") == [
        "--until: no step 'onix'. Known: model, distill, prune, prune-2, small, quantize, onnx-int8, onnx,"
        " tensorrt. Did you mean 'onnx'?"
    ]


def test_a_step_stands_on_the_steps_that_its_settings_name(folder: Path) -> None:
    stages = "[{finetune: {}, name: tuned}, {prune: {}, from: model}, {distill: {teacher: tuned}}, onnx]"
    made = plan(folder, stages, until="distill")
    assert [s.name for s in made.steps] == ["tuned", "prune", "distill"]
    assert made.step("distill").stands_on == ("prune", "tuned")
    assert made.step("prune").stands_on == ("model",)


def test_gate_without_at_is_not_moved_to_another_step_by_until(folder: Path) -> None:
    gates = "\ngates: {bleu: {max_drop: 1}, chrf: {max_drop: 1, at: [prune, onnx]}, size_bytes: {max: 9}}"
    stages = "[prune, {quantize: {}, name: small}, onnx, {onnx: {}, from: prune, name: other}]" + gates
    every = plan(folder, stages)
    assert [(g.metric, g.at) for g in every.gates] == [
        ("bleu", ("onnx", "other")),
        ("chrf", ("prune", "onnx")),
        ("size_bytes", ("onnx", "other")),
    ]
    assert every.warnings == ()
    part = plan(folder, stages, until="small")
    assert [(g.metric, g.at) for g in part.gates] == [("chrf", ("prune",))]
    assert part.warnings == (
        "the gate on bleu is not judged at onnx, other, which --until leaves out.",
        "the gate on chrf is not judged at onnx, which --until leaves out.",
        "the gate on size_bytes is not judged at onnx, other, which --until leaves out.",
    )
    branch = plan(folder, stages, until="other")
    assert [(g.metric, g.at) for g in branch.gates] == [
        ("bleu", ("other",)),
        ("chrf", ("prune",)),
        ("size_bytes", ("other",)),
    ]


def test_drop_is_not_judged_when_the_baseline_is_left_out(folder: Path) -> None:
    stages = "[prune, {prune: {}, from: model, name: other}]"
    stages += "\nbaseline: prune\ngates: {bleu: {max_drop: 1, min: 2}}"
    made = plan(folder, stages, until="other")
    assert [(g.metric, g.kind) for g in made.gates] == [("bleu", "min")]
    assert made.warnings == ("the baseline 'prune' is left out, so nothing is compared with it.",)


def test_gate_on_speed_is_left_out_when_the_command_line_turns_latency_off(folder: Path) -> None:
    stages = "[prune]\ngates: {speedup: {min: 2}, bleu: {min: 1}}"
    made = plan(folder, stages, "score.latency=false")
    assert [g.metric for g in made.gates] == ["bleu"]
    assert made.warnings == ("the gate on speedup is not judged, because latency is switched off.",)
    assert "gate on speedup is not judged" in " ".join(describe_plan(made).split())
    assert mistakes(folder, stages + "\nscore: {latency: false}") == [
        "5: gates.speedup: there is no speedup without latency; remove `latency: false` or this gate."
    ]


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


def test_parts_of_one_file_are_planned(folder: Path) -> None:
    head = (
        "model: model\ntask: translation\ndata: {train: train.jsonl, split: {test: 0.1, validation: 0.05}}\n"
    )
    made = plan(folder, "[prune]", head=head)
    assert {name: len(rows) for name, rows in made.splits.items()} == {
        "train": 102,
        "validation": 6,
        "test": 12,
    }
    assert "test        10 % of train, seed 0 (12 rows)" in describe_plan(made)
    assert list(made.read_data(5)) == ["train", "validation", "test"]
    texts = [{e.text for e in rows.examples} for rows in made.splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts))
    again = plan(folder, "[]", "seed=1", head=head)
    assert again.splits["test"].fingerprint != made.splits["test"].fingerprint
    large = plan(folder, "[prune]", head=head)
    assert large.read_data()["train"].fingerprint == made.splits["train"].fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "{train: train.jsonl}",
            "data.test: missing; expected a file or a hub id (or beside train, `split: {test",
        ),
        ("{split: {test: 0.1}}", "data.split: takes rows out of train, and there is no train: name a file."),
        ("{train: train.jsonl, split: {validation: 0.1}}", "data.test: missing; expected a file"),
        (
            "{train: train.jsonl, test: test.jsonl, split: {test: 0.1}}",
            "data.split.test: 'test' has a file of its own. Remove one of the two.",
        ),
        ("{train: train.jsonl, split: {test: 1}}", "data.split.test: expected a number between 0 and 1"),
        (
            "{train: train.jsonl, split: {test: 0.5, validation: 0.5}}",
            "data.split: the shares leave nothing to train on; together they must be less than 1.",
        ),
        (
            "{train: train.jsonl, split: {calibration: 0.5, test: 0.1}}",
            "data.split.calibration: unknown; known here",
        ),
        ("{train: few.jsonl, split: {test: 0.1}}", "1 different texts cannot be divided into 2 splits."),
    ],
)
def test_splits_that_cannot_be_are_told(folder: Path, data: str, message: str) -> None:
    (folder / "few.jsonl").write_text('{"source": "a", "target": "b"}\n' * 9)
    [found] = mistakes(folder, "[]", head=f"model: model\ntask: translation\ndata: {data}\n")
    assert message in found


def test_overrides_are_applied_and_kept_in_the_text(folder: Path) -> None:
    made = plan(folder, TREE, "prune-2.keep=0.9", "seed=4")
    assert made.step("prune-2").settings.model_dump()["keep"] == 0.9
    assert made.recipe.seed == 4
    assert made.recipe_dict()["seed"] == 4
    assert made.text.endswith("\n# --set prune-2.keep=0.9\n# --set seed=4")


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
            "4: stages[1].onnx.target: TensorRT cannot run the dynamic int8 of 'quantize'; give `from: model`.",  # noqa: E501
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
            "4: stages[0].onnx.target: expected one of 'ort-cpu', 'tensorrt', read 'tensort'. Did you mean 'tensorrt'?",  # noqa: E501
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tset.jsonl", None, "tset.jsonl: no such file (data for 'test'). Did you mean 'test.jsonl'?"),
        ("empty.jsonl", b"", "no rows in this file"),
        # a time of 0: the id of a test must be the same in every process
        ("broken.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-12], "cannot be read"),
        ("garbage.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00garbage", "cannot be read"),
        ("odd.xyz", b"a", "unknown kind of file '.xyz'"),
    ],
)
def test_data_files_are_checked(folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    [found] = mistakes(folder, "[]", f"data.test={name}")
    assert found.startswith(f"--set data.test={name}: data.test: ")
    assert message in found


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "modle",
            "no such folder; expected a model's folder with config.json, or a hub id. Did you mean 'model'?",
        ),
        ("''", "expected a model's folder or a hub id, read an empty name."),
        ("m.onnx", "starting from an ONNX file is not yet supported by this version."),
    ],
)
def test_models_are_checked(folder: Path, model: str, message: str) -> None:
    [found] = mistakes(folder, "[]", head=HEAD.replace("model: model", f"model: {model}"))
    assert found.startswith("1: model: ")
    assert message in found


def test_hub_ids_are_left_to_the_run(folder: Path) -> None:
    made = plan(folder, "[]", "model=someone/something", "data.train=someone/rows")
    assert made.local_model is None
    assert made.notes == ("'someone/something' is no folder here; the run fetches it from the hub.",)
    assert "note        'someone/something' is no folder" in describe_plan(made)
    assert made.warnings == ()
    assert list(made.splits) == ["test"]


def test_missing_tensorrt_stops_a_run_before_any_work_unless_optional(folder: Path) -> None:
    stages = "\n  - onnx: {target: tensorrt}\n  - tensorrt: {}\n"
    made = plan(folder, stages)
    with pytest.raises(MissingDependencyError) as caught:
        made.require_runnable()
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{folder / 'recipe.yaml'}:6: step 'tensorrt' cannot run here: TensorRT is not installed"
        " (pip install tensorrt, with an NVIDIA GPU). With `optional: true` beside the stage it is skipped."
    )
    plan(folder, stages, "tensorrt.optional=true").require_runnable()
    plan(folder, stages, until="onnx").require_runnable()


def test_tensorrt_needs_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    made = plan(folder, "[{onnx: {target: tensorrt}}, tensorrt]")
    assert made.step("tensorrt").unavailable == "there is no NVIDIA GPU with a working driver."
    assert made.step("tensorrt").unscored is not None
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    assert plan(folder, "[{onnx: {target: tensorrt}}, tensorrt]").step("tensorrt").unavailable is None


def test_tensorrt_that_builds_ahead_of_time_is_planned_but_not_scored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    monkeypatch.setattr(machine, "builds_ahead_of_time", lambda: True)
    stages = "[{onnx: {target: tensorrt}}, tensorrt]"
    made = plan(folder, stages, "gates={bleu: {max_drop: 1}}", "baseline=tensorrt")
    step = made.step("tensorrt")
    assert step.unavailable is None
    assert step.unscored is not None
    assert step.unscored.startswith("scoring needs a CUDA GPU")
    assert made.gates[0].at == ("onnx",)  # the last step of the branch that has a score
    assert [w for w in made.warnings if "nothing is compared with the baseline 'tensorrt'" in w]
    assert "built, not scored (needs a CUDA GPU)" in " ".join(describe_plan(made).split())
    assert made.step("onnx").unscored is None
    made.require_runnable()


def test_builder_without_a_gpu_is_tried_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(builder: str) -> bool:
        text = f"class Logger:\n    ERROR = 1\n    def __init__(self, level): pass\n{builder}\n"
        (tmp_path / "tensorrt.py").write_text(text)
        machine.builds_ahead_of_time.cache_clear()
        return machine.builds_ahead_of_time()

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert answer("Builder = lambda logger: object()")
        assert not answer("Builder = lambda logger: None")
        assert not answer("def Builder(logger): raise TypeError('factory function returned nullptr')")
        assert not answer("import os; os.abort()")
    finally:
        machine.builds_ahead_of_time.cache_clear()


def test_poor_orders_are_warned_about(folder: Path) -> None:
    made = plan(folder, "[factorize, prune, {distill: {student: {decoder_layers: 1}}}]")
    assert made.warnings == (
        "line 4: prune: pruning after factorize finds few whole matrices; prune first.",
        "line 4: distill: choosing a student's layers after factorize and prune throws part of that work away;"  # noqa: E501
        " distil to fewer layers first.",
    )


def test_read_data_gives_all_splits_and_limits_them(folder: Path) -> None:
    splits = plan(folder, "[]").read_data(limit=2)
    assert {name: len(split) for name, split in splits.items()} == {"train": 2, "test": 2}
    assert splits["train"].examples[1].text == "a 1"


def test_describe_plan_shows_the_tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plan(folder, TREE)
    text = describe_plan(load_plan(Path("recipe.yaml")))
    assert (
        text
        == """\
recipe.yaml: translation, 8 steps

model       model
train       train.jsonl (120 rows)
test        test.jsonl (101 rows)

model
distill -> torch  {student: {decoder_layers: 1}}  reads train
prune -> torch  {keep: 0.25}  reads train
prune-2 (prune) -> torch  reads train
small (factorize) -> torch
├─ quantize -> torch
│  onnx-int8 (onnx) -> onnx
└─ onnx -> onnx  {target: tensorrt}
   tensorrt -> tensorrt  will be skipped: TensorRT is not installed (pip install
       tensorrt, with an NVIDIA GPU).

score       bleu, chrf, rouge1, rouge2, rougeL; greedy, to the model's longest
            output; latency at batch size 1, 8 against model
gate        bleu: drop at most 1 at onnx-int8, onnx
gate        bleu: at least 20 at onnx-int8, onnx
gate        size_bytes: at most 1,000,000 at small
"""
    )
    assert max(map(len, text.splitlines())) <= 80


def test_describe_plan_says_what_cannot_run(folder: Path) -> None:
    text = describe_plan(plan(folder, "[{onnx: {target: tensorrt}}, tensorrt]", until="tensorrt"))
    assert "CANNOT RUN: TensorRT is not installed" in text
    assert "cannot run here as it is: tensorrt." in text
    assert "until       tensorrt; left out: nothing" in text


def test_command_ends_with_2_when_a_step_cannot_run_here(folder: Path) -> None:
    path = folder / "recipe.yaml"
    for optional, code in (("false", 2), ("true", 0)):
        path.write_text(
            f"{HEAD}stages: [{{onnx: {{target: tensorrt}}}}, {{tensorrt: {{}}, optional: {optional}}}]\n"
        )
        done = CliRunner().invoke(main, ["plan", str(path)])
        assert done.exit_code == code
        assert ("CANNOT RUN" in done.output) == (code == 2)


_WORDS = st.sampled_from(["model", "test.jsonl", "prune", "onnx", "~nobody/x", "a" * 300, "x\0y", "..", ""])
_STEP = st.dictionaries(
    st.sampled_from([*stage_table.TABLE, "name", "from", "optional"]),
    _WORDS | st.none() | st.booleans() | st.dictionaries(st.sampled_from(["keep", "target"]), _WORDS),
    max_size=3,
)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(_WORDS, _WORDS, st.lists(_STEP, max_size=4), _WORDS, _WORDS)
def test_any_plan_is_made_or_is_an_input_error(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    test: str,
    steps: list[Any],
    baseline: str,
    until: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    recipe = {
        "model": model,
        "task": "translation",
        "data": {"test": test},
        "stages": steps,
        "baseline": baseline,
    }
    path.write_text(json.dumps(recipe))
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        assert load_plan(path, (), until).path == path


def test_plan_is_quick_and_imports_nothing_heavy(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(HEAD + "stages: []\n")
    code = (
        "import sys; from pathlib import Path; from smelt.plan.load import load_plan;"
        "from smelt.plan.printed import describe_plan;"
        f"describe_plan(load_plan(Path({str(folder / 'recipe.yaml')!r})));"
        "sys.exit(' '.join({'torch', 'transformers', 'onnx', 'onnxruntime', 'datasets', 'sklearn'} & set(sys.modules)))"  # noqa: E501
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.strip() == ""
    # computing time, which a busy machine stretches less than the time on the clock
    assert after.ru_utime - before.ru_utime < 3
