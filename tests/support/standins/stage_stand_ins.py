"""Plans of recipes whose stages are stand-ins, in a folder with a model and data that are none.

A file of tests that asks for its fixtures says `pytest_plugins = ["stage_stand_ins"]`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field
from safetensors.numpy import save_file

from smelt.core.errors import InputError
from smelt.core.messages import Message
from smelt.pipeline.inspect import machine
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.recipe import stages as stage_table
from smelt.stage import Settings, Stage, StepName
from tests.support.models import tiny

TASKS = frozenset({"translation", "text-classification"})


class _TrainSettings(Settings):
    keep_ratio: float = Field(default=0.5, ge=0, le=1)
    student: dict[str, int] | None = None


class _DistillSettings(_TrainSettings):
    teacher: StepName = "model"


class _OnnxSettings(Settings):
    target: Literal["ort-cpu", "tensorrt", "openvino"] = "ort-cpu"
    dtype: str = "fp32"


class _QuantizeSettings(_TrainSettings):
    scheme: ClassVar[str] = "int8-dynamic"
    mixed_precision: ClassVar[None] = None
    embedding_scheme: ClassVar[None] = None
    linear_schemes: ClassVar[tuple[str, ...]] = ("int8-dynamic",)

    def used_schemes(self) -> tuple[str, ...]:
        return ("int8-dynamic",)

    def scheme_options(self, scheme: str) -> dict[str, Any]:
        return {}


def _stand_in_stage(stage_name: str) -> Any:
    """A class with the contract of a stage, so that these tests are about plans alone."""
    trains = stage_name in ("finetune", "distill", "prune")
    settings = {
        "onnx": _OnnxSettings, "distill": _DistillSettings, "quantize": _QuantizeSettings,
        "quantize-onnx": _QuantizeSettings,
    }  # fmt: skip
    real = stage_table.load_stage(stage_name)
    return type(
        stage_name,
        (Stage,),
        {
            "name": stage_name,
            "accepts": frozenset({"onnx" if stage_name == "tensorrt" else "torch"}),
            "produces": stage_name if stage_name in ("onnx", "tensorrt") else "torch",
            "needs": frozenset({"train"} if trains else {"tensorrt"} if stage_name == "tensorrt" else ()),
            "needs_float": stage_name in ("prune", "factorize", "quantize"),
            "tasks": frozenset({"translation"}) if stage_name == "factorize" else TASKS,
            "settings_type": settings.get(stage_name, _TrainSettings),
            "trains_weights": real.trains_weights,
            "poor_order": real.poor_order,
        },
    )


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every stage be a stand-in, and nothing be installed that is optional."""
    table = {stage_name: _stand_in_stage(stage_name) for stage_name in stage_table.STAGE_CLASSES}
    monkeypatch.setattr(stage_table, "load_stage", table.__getitem__)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)


def write_model_and_data(folder: Path) -> Path:
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


RECIPE_HEAD = "model: model\ntask: translation\ndata: {train: train.jsonl, test: test.jsonl}\n"


def plan_stages(
    folder: Path, stages: str, *overrides: str, head: str = RECIPE_HEAD, until: str | None = None
) -> Plan:
    path = folder / "recipe.yaml"
    path.write_text(f"{head}stages: {stages}\n")
    return load_plan(path, overrides, until)


def plan_errors(folder: Path, stages: str, *overrides: str, **more: Any) -> list[Message]:
    """Return what the plan of a recipe is refused for."""
    with pytest.raises(InputError) as excinfo:
        plan_stages(folder, stages, *overrides, **more)
    assert excinfo.value.exit_code == 2
    return list(excinfo.value.messages)


STAGE_TREE = """
  - distill: {student: {decoder_layers: 1}}
  - prune: {keep_ratio: 0.25}
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
  bleu: {max_degradation: 1.0, min: 20}
  size_bytes: {max: 1_000_000, at: [small]}"""


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Marian and pairs to train and test it, for plans of stages as they are."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.write_marian(folder / "model")
    for name in ("train", "test"):
        tiny.write_pairs(folder / f"{name}.jsonl")
    return folder


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to plan in."""
    return write_model_and_data(tmp_path)
