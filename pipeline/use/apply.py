"""One stage on one model, from Python: `smelt.apply`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from smelt.core.artifact import MANIFEST, Artifact, read_artifact
from smelt.core.data import CLASSIFICATION, CUSTOM, IMAGES, TEXT_TO_TEXT, Task
from smelt.core.errors import InputError, RunError, together
from smelt.core.files import load_json
from smelt.core.messages import Message
from smelt.core.stage import needs_of
from smelt.execute.run import Options, run_plan
from smelt.export.package.new_folder import new_folder, require_free
from smelt.look.foreign import is_onnx
from smelt.look.model import look
from smelt.planning.load import make_plan
from smelt.recipe.stage_table import load_stage
from smelt.use.recipes import Recipe

_STEP = "applied"
# The files of data that may stand in for the test rows, which are read and not scored.
_SPLITS = ("test", "validation", "calibration", "train")
_TEXT = "It is late."


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
    """See `smelt.apply`."""
    target = Path(out).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(
            f"{target}: exists and is not an empty folder. Give another `out`.",
            code="out-exists",
            setting="out",
            file=str(target),
        )
    require_free(target)
    cls = load_stage(stage)
    source = Path(model).expanduser()
    place = str(source.absolute()) if source.exists() else str(model)
    kind = task or _task_of(source, place)
    with tempfile.TemporaryDirectory(prefix="smelt-apply-") as folder:
        files = _files(data, "train" if "train" in needs_of(cls, cls.settings_type()) else "calibration")
        if not set(files) & set(_SPLITS):
            files["test"] = str(_made_up(kind, place, Path(folder)))
        if not isinstance(split := files.get("split"), Mapping) or "test" not in split:
            files.setdefault("test", next(files[name] for name in _SPLITS if name in files))
        keys: dict[str, Any] = {} if threads is None else {"threads": threads}
        try:
            recipe = Recipe(
                place, kind, files, [{stage: dict(settings), "name": _STEP}],
                name=stage, seed=seed, device=device, score={"latency": False}, **keys,
            )  # fmt: skip
            plan = make_plan(recipe.document(), recipe.path)
            options = Options(Path(folder, "run"), Path(folder, "store"), quiet=True, scored=False)
            result = run_plan(plan, options)
        except InputError as error:
            raise _as_arguments(
                error, stage, "test" in (data if isinstance(data, Mapping) else ())
            ) from error
        if result.report["status"] == "interrupted":  # which a run reports, and a call does not survive
            raise KeyboardInterrupt
        for step in result.report["steps"]:
            if step["error"]:
                found = Message(**step["error"])
                raise RunError(
                    found.message, code=found.code, setting=found.setting, file=found.file, line=found.line
                )
        with new_folder(target) as made:
            shutil.copytree(result.artifact(_STEP), made, dirs_exist_ok=True)
    return read_artifact(target)


def _as_arguments(error: InputError, stage: str, has_test: bool) -> InputError:
    """Return what was found in the recipe that stands for a call, as what was found in its arguments."""
    if not error.found:
        return error
    own = (f"{stage}.yaml", str(Path.cwd() / f"{stage}.yaml"))
    settings = f"stages[0].{stage}"
    found = []
    for one in error.found:
        if one.setting == "data.test" and not has_test and len(error.found) > 1:
            continue  # said already of the file that stands there too
        text = one.message.removeprefix(f"{one.file}:{one.line}: ") if one.file in own else one.message
        text = text.removeprefix(f"{settings}.").removeprefix(f"{settings}: ")
        where = None if one.setting == settings else (one.setting or "").removeprefix(f"{settings}.") or None
        place = (None, None) if one.file in own else (one.file, one.line)
        found.append(replace(one, message=text, setting=where, file=place[0], line=place[1]))
    return together(found, type(error))


def _task_of(source: Path, place: str) -> Task:
    """Return the task of a model: of an artifact its own, of a checkpoint what its config says."""
    if (source / MANIFEST).is_file():
        return read_artifact(source).manifest.task  # type: ignore[return-value]
    return CUSTOM if is_onnx(place, Path.cwd()) else look(place).task


def _files(data: str | PathLike[str] | Mapping[str, Any] | None, alone: str) -> dict[str, Any]:
    """Return the recipe's `data`; a file that is given alone is for what the stage needs."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        data = {alone: data}
    names = (*_SPLITS, "unlabelled")
    return {
        name: str(path.absolute())
        if name in names and isinstance(value, str | PathLike) and (path := Path(value).expanduser()).exists()
        else value
        for name, value in data.items()
    }


def _made_up(task: Task, place: str, folder: Path) -> Path:
    """Write a row that stands where a recipe has test rows: it is read, and nothing is scored on it.

    Raises:
        InputError: rows of such a task cannot be made up.
    """
    row: dict[str, Any] = {"text": _TEXT}
    if task in TEXT_TO_TEXT:
        row = {"source": _TEXT, "target": _TEXT}
    elif task in (CUSTOM, IMAGES):
        raise InputError(
            f"data: a stage on a model for {task} needs rows to try it on.",
            code="missing-data",
            setting="data",
        )
    elif task in CLASSIFICATION:
        config = load_json(Path(place, "config.json")) if Path(place, "config.json").is_file() else {}
        names = list((config.get("id2label") or {"0": "LABEL_0"}).values())
        kind = config.get("problem_type")
        row["label"] = 0.0 if kind == "regression" else names[:1] if kind else names[0]
        if kind == "single_label_classification":
            row["label"] = names[0]
    path = folder / "row.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path
