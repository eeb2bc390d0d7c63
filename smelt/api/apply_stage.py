"""Run one stage on one model, for `smelt.apply`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from smelt.api.recipes import Recipe
from smelt.core.artifact import MANIFEST, Artifact, read_artifact
from smelt.core.data import CLASSIFICATION_TASKS, CUSTOM_TASK, IMAGE_CLASSIFICATION, TEXT_TO_TEXT_TASKS, Task
from smelt.core.errors import InputError, RunError, combined_error
from smelt.core.files import load_json
from smelt.core.messages import Message
from smelt.core.stage import stage_needs
from smelt.execute.run import RunOptions, run_plan
from smelt.export.package.atomic_folder import atomic_folder, require_empty_destination
from smelt.inspect.model_info import inspect_model
from smelt.inspect.onnx_files import is_onnx
from smelt.planning.load_plan import make_plan
from smelt.recipe.stage_table import load_stage

_STEP_NAME = "applied"
# Splits that can replace the test split, which is read but not scored.
_TEST_SUBSTITUTES = ("test", "validation", "calibration", "train")
_PLACEHOLDER_TEXT = "It is late."


def apply_stage(
    stage: str,
    model: str | PathLike[str],
    out: str | PathLike[str],
    data: str | PathLike[str] | Mapping[str, Any] | None,
    task: Task | None,
    seed: int,
    threads: int | None,
    device: str,
    settings: Mapping[str, Any],
) -> Artifact:
    """Run one stage on a model and return the artifact; see `smelt.apply`."""
    target = Path(out).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(
            f"{target}: exists and is not an empty folder. Choose another `out`.",
            code="out-exists",
            setting="out",
            file=str(target),
        )
    require_empty_destination(target)
    cls = load_stage(stage)
    source = Path(model).expanduser()
    place = str(source.absolute()) if source.exists() else str(model)
    kind = task or _infer_task(source, place)
    with tempfile.TemporaryDirectory(prefix="smelt-apply-") as folder:
        files = _data_settings(
            data, "train" if "train" in stage_needs(cls, cls.settings_type()) else "calibration"
        )
        if not set(files) & set(_TEST_SUBSTITUTES):
            files["test"] = str(_write_placeholder_rows(kind, place, Path(folder)))
        if not isinstance(split := files.get("split"), Mapping) or "test" not in split:
            files.setdefault("test", next(files[name] for name in _TEST_SUBSTITUTES if name in files))
        keys: dict[str, Any] = {} if threads is None else {"threads": threads}
        try:
            recipe = Recipe(
                place, kind, files, [{stage: dict(settings), "name": _STEP_NAME}],
                name=stage, seed=seed, device=device, score={"latency": False}, **keys,
            )  # fmt: skip
            plan = make_plan(recipe.document(), recipe.path)
            options = RunOptions(Path(folder, "run"), Path(folder, "store"), quiet=True, scored=False)
            result = run_plan(plan, options)
        except InputError as error:
            raise _as_argument_error(
                error, stage, "test" in (data if isinstance(data, Mapping) else ())
            ) from error
        if result.report["status"] == "interrupted":  # a run reports it, a function call must raise
            raise KeyboardInterrupt
        for step in result.report["steps"]:
            if step["error"]:
                found = Message(**step["error"])
                raise RunError(
                    found.message, code=found.code, setting=found.setting, file=found.file, line=found.line
                )
        with atomic_folder(target) as made:
            shutil.copytree(result.artifact(_STEP_NAME), made, dirs_exist_ok=True)
    return read_artifact(target)


def _as_argument_error(error: InputError, stage: str, has_test: bool) -> InputError:
    """Return an error about the generated recipe as one about the arguments of the call."""
    if not error.found:
        return error
    own = (f"{stage}.yaml", str(Path.cwd() / f"{stage}.yaml"))
    settings = f"stages[0].{stage}"
    found = []
    for one in error.found:
        if one.setting == "data.test" and not has_test and len(error.found) > 1:
            continue  # already reported for the file that replaces the test split
        text = one.message.removeprefix(f"{one.file}:{one.line}: ") if one.file in own else one.message
        text = text.removeprefix(f"{settings}.").removeprefix(f"{settings}: ")
        where = None if one.setting == settings else (one.setting or "").removeprefix(f"{settings}.") or None
        place = (None, None) if one.file in own else (one.file, one.line)
        found.append(replace(one, message=text, setting=where, file=place[0], line=place[1]))
    return combined_error(found, type(error))


def _infer_task(source: Path, place: str) -> Task:
    """Return the task of a model, from an artifact's manifest or a checkpoint's config."""
    if (source / MANIFEST).is_file():
        return read_artifact(source).manifest.task  # type: ignore[return-value]
    return CUSTOM_TASK if is_onnx(place, Path.cwd()) else inspect_model(place).task


def _data_settings(data: str | PathLike[str] | Mapping[str, Any] | None, alone: str) -> dict[str, Any]:
    """Return the recipe's `data`; a single file becomes the split `alone`."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        data = {alone: data}
    names = (*_TEST_SUBSTITUTES, "unlabelled")
    return {
        name: str(path.absolute())
        if name in names and isinstance(value, str | PathLike) and (path := Path(value).expanduser()).exists()
        else value
        for name, value in data.items()
    }


def _write_placeholder_rows(task: Task, place: str, folder: Path) -> Path:
    """Write one placeholder sample as the test split, which is read but not scored; return its path.

    Raises:
        InputError: the task needs real samples.
    """
    row: dict[str, Any] = {"text": _PLACEHOLDER_TEXT}
    if task in TEXT_TO_TEXT_TASKS:
        row = {"source": _PLACEHOLDER_TEXT, "target": _PLACEHOLDER_TEXT}
    elif task in (CUSTOM_TASK, IMAGE_CLASSIFICATION):
        raise InputError(
            f"data: a trial run of a model for {task} needs samples. Set data.",
            code="missing-data",
            setting="data",
        )
    elif task in CLASSIFICATION_TASKS:
        config = load_json(Path(place, "config.json")) if Path(place, "config.json").is_file() else {}
        names = list((config.get("id2label") or {"0": "LABEL_0"}).values())
        kind = config.get("problem_type")
        row["label"] = 0.0 if kind == "regression" else names[:1] if kind else names[0]
        if kind == "single_label_classification":
            row["label"] = names[0]
    path = folder / "row.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path
