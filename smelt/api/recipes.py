"""Build, read and run recipes from Python: `smelt.Recipe`, `smelt.plan`, `smelt.apply` and `smelt report`.

`smelt.apply` runs one stage on one model. `smelt report` writes the report of a finished run again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError, RunError, combined_error
from smelt.core.files import MANIFEST, load_json, write_atomically
from smelt.core.messages import Message, error_message
from smelt.core.workspaces import temporary_workspace
from smelt.data.tasks import Task, tasks_with
from smelt.evaluate.report.chart import chart_files
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from smelt.export.package.write_package import atomic_folder, require_empty_destination
from smelt.pipeline.execute.run import RunOptions, run_plan
from smelt.pipeline.execute.run_result import Report, Result, report_csv, summary_lines, write_report
from smelt.pipeline.inspect.model_info import inspect_model, is_onnx
from smelt.pipeline.plan.load_plan import make_plan
from smelt.pipeline.recipe.recipe import check_recipe, find_recipe
from smelt.pipeline.recipe.stages import ONNX_EQUIVALENTS, load_stage
from smelt.pipeline.recipe.validation_errors import dotted_path, validate_settings, value_text
from smelt.pipeline.recipe.yaml_file import KeyPath, YamlDocument, dump_yaml, parse_yaml, read_yaml
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import Plan


class Recipe:
    """A recipe: model, task, data, stages, and scoring.

        recipe = smelt.Recipe(
            model="models/my-translator",
            task="translation",
            data={"train": "train.jsonl", "test": "test.jsonl"},
            stages=[{"quantize": {"scheme": "int8-dynamic"}}, {"onnx": {}, "name": "onnx-int8"}],
        )

    The values are checked on construction, as for a recipe file; all errors are reported together.

    Args:
        model, task, data, stages: as in a recipe file.
        name: name of the run; its folder is runs/NAME unless `out` of `smelt.run` is set.
        base: the folder that paths in the recipe are relative to (default: the current one).
        **keys: the other keys of a recipe, such as `score`, `gates` and `seed`.

    Raises:
        InputError: values are invalid; the message lists every error.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Mapping[str, Any],
        task: str,
        data: Mapping[str, Any],
        stages: Sequence[Any] = (),
        *,
        name: str = "recipe",
        base: str | PathLike[str] = ".",
        **keys: Any,
    ) -> None:
        if not isinstance(name, str) or not name.strip() or Path(name).name != name or name == "..":
            raise InputError(
                f"name: expected a folder name such as my-model, got {name!r}.",
                code="wrong-value",
                setting="name",
            )
        values = to_plain({"model": model, "task": task, "data": data, **keys, "stages": stages})
        text = dump_yaml(values)
        self._read(text, Path(base).expanduser().resolve() / f"{name}.yaml")

    @classmethod
    def from_yaml(cls, source: str | PathLike[str]) -> Recipe:
        """Read a recipe from a file, by the name of an included recipe, or from a multi-line string.

        Raises:
            InputError: no such recipe, or it has errors; the message lists every error.
        """
        recipe = cls.__new__(cls)
        if isinstance(source, str) and "\n" in source:
            recipe._read(source, Path.cwd() / "recipe.yaml")
        else:
            path = find_recipe(str(source))
            recipe._read(read_yaml(path).text, path.resolve())
        return recipe

    def to_yaml(self, path: str | PathLike[str] | None = None) -> str:
        """Return the recipe as YAML, and write it to `path` if given.

        Raises:
            InputError: `path` cannot be written.
        """
        if path is not None:
            target = Path(path).expanduser()
            try:
                write_atomically(target, self.text)
            except OSError as error:
                raise InputError(
                    f"{target}: cannot write the file: {error.strerror}. Choose another path.",
                    code="unwritable-file",
                    file=str(target),
                ) from error
        return self.text

    def document(self) -> YamlDocument:
        """Return the recipe as a parsed document."""
        return parse_yaml(self.text, self.path.name)

    def _read(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        recipe, errors, _ = check_recipe(self.document(), path, ())
        on_graphs = ONNX_EQUIVALENTS if is_onnx(recipe.model, recipe.base) else {}
        for entry in recipe.stages:
            if entry.has_settings:
                cls = load_stage(on_graphs.get(entry.stage, entry.stage))
                validate_settings(cls.settings_type, entry.settings, entry.path, errors)
        errors.raise_if_any()

    def __repr__(self) -> str:
        return f"Recipe({self.path.stem!r})\n{self.text}"


def to_plain(value: Any, where: KeyPath = ()) -> Any:
    """Return `value` as plain types for YAML and JSON: paths as strings, NumPy as numbers, tuples as lists.

    Raises:
        InputError: a value has another type; the message names the setting.
    """
    if isinstance(value, PathLike):
        return str(Path(value))
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy
        return to_plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, (*where, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, (*where, number)) for number, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    text = f"{dotted_path(where)}: expected strings, numbers, lists and mappings, got {value_text(value)}."
    raise combined_error([error_message("wrong-value", text, setting=dotted_path(where))])


def plan_recipe(
    recipe: str | PathLike[str] | Recipe, overrides: Sequence[str] = (), until: str | None = None
) -> Plan:
    """Return the plan of a recipe: a `Recipe`, a file, or the name of an included recipe.

    Raises:
        InputError: there are errors in the recipe, the model's folder or the data; lists all of them.
    """
    from smelt.pipeline.plan.load_plan import load_plan

    if isinstance(recipe, Recipe):
        return make_plan(recipe.document(), recipe.path, overrides, until)
    return load_plan(recipe if isinstance(recipe, str) else Path(recipe), overrides, until)


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
    model_path = str(source.absolute()) if source.exists() else str(model)
    kind = task or _infer_task(source, model_path)
    with temporary_workspace() as folder:
        files = _data_settings(
            data, "train" if "train" in cls.needs_with(cls.settings_type()) else "calibration"
        )
        if not set(files) & set(_TEST_SUBSTITUTES):
            files["test"] = str(_write_placeholder_rows(kind, model_path, Path(folder)))
        if not isinstance(split := files.get("split"), Mapping) or "test" not in split:
            files.setdefault("test", next(files[name] for name in _TEST_SUBSTITUTES if name in files))
        keys: dict[str, Any] = {} if threads is None else {"threads": threads}
        try:
            recipe = Recipe(
                model_path, kind, files, [{stage: dict(settings), "name": _STEP_NAME}],
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
                message = Message(**step["error"])
                raise RunError(
                    message.message,
                    code=message.code,
                    setting=message.setting,
                    file=message.file,
                    line=message.line,
                )
        with atomic_folder(target) as temporary:
            shutil.copytree(result.artifact(_STEP_NAME), temporary, dirs_exist_ok=True)
    return read_artifact(target)


def _as_argument_error(error: InputError, stage: str, has_test: bool) -> InputError:
    """Return an error about the generated recipe as one about the arguments of the call."""
    if not error.messages:
        return error
    recipe_files = (f"{stage}.yaml", str(Path.cwd() / f"{stage}.yaml"))
    settings = f"stages[0].{stage}"
    messages = []
    for message in error.messages:
        if message.setting == "data.test" and not has_test and len(error.messages) > 1:
            continue  # already reported for the file that replaces the test split
        text = (
            message.message.removeprefix(f"{message.file}:{message.line}: ")
            if message.file in recipe_files
            else message.message
        )
        text = text.removeprefix(f"{settings}.").removeprefix(f"{settings}: ")
        setting_name = (
            None
            if message.setting == settings
            else (message.setting or "").removeprefix(f"{settings}.") or None
        )
        location = (None, None) if message.file in recipe_files else (message.file, message.line)
        messages.append(
            replace(message, message=text, setting=setting_name, file=location[0], line=location[1])
        )
    return combined_error(messages, type(error))


def _infer_task(source: Path, model_folder: str) -> Task:
    """Return the task of a model, from an artifact's manifest or a checkpoint's config."""
    if (source / MANIFEST).is_file():
        return read_artifact(source).manifest.task  # type: ignore[return-value]
    (arrays,) = tasks_with(modality="arrays")
    return arrays if is_onnx(model_folder, Path.cwd()) else inspect_model(model_folder).task


def _data_settings(data: str | PathLike[str] | Mapping[str, Any] | None, alone: str) -> dict[str, Any]:
    """Return the recipe's `data`; a single file becomes the split `alone`."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        data = {alone: data}
    names = (*_TEST_SUBSTITUTES, "unlabeled")
    return {
        name: str(path.absolute())
        if name in names and isinstance(value, str | PathLike) and (path := Path(value).expanduser()).exists()
        else value
        for name, value in data.items()
    }


def _write_placeholder_rows(task: Task, model_folder: str, folder: Path) -> Path:
    """Write one placeholder sample as the test split, which is read but not scored; return its path.

    Raises:
        InputError: the task needs real samples.
    """
    config = (
        load_json(Path(model_folder, "config.json")) if Path(model_folder, "config.json").is_file() else {}
    )
    sample = task_spec(task).placeholder_row(_PLACEHOLDER_TEXT, config)
    if sample is None:
        raise InputError(
            f"data: a trial run of a model for {task} needs samples. Set data.",
            code="missing-data",
            setting="data",
        )
    path = folder / "row.jsonl"
    path.write_text(json.dumps(sample) + "\n", encoding="utf-8")
    return path


def redraw_report(folder: Path) -> str:
    """Write all files of the report in `folder` again from report.json; return what `smelt run` prints last.

    Raises:
        InputError: there is no report, or this version of smelt cannot read it.
    """
    report = Report.read(folder)
    write_report(folder, report.data)
    return "\n".join(summary_lines(Result(report, folder)))


def report_chart(folder: Path, kind: str) -> bytes:
    """Return the chart of the run in `folder` as a file of format `kind`, svg or png.

    That of quality against speed; where nothing was timed, that of the changes by stage.

    Raises:
        InputError: as `redraw_report`, or the run has nothing to draw.
    """
    charts = chart_files(validate_report(Report.read(folder).data))
    for name in (f"report.{kind}", f"waterfall.{kind}"):
        if name in charts:
            return charts[name]
    raise InputError(
        f"{folder}: fewer than two steps of this run have a score or a size, so there is no chart.",
        code="nothing-to-draw",
        file=str(folder),
    )


def report_text(folder: Path, as_format: str) -> str:
    """Return the report of the run in `folder` as html, md, csv or json.

    Raises:
        InputError: as `redraw_report`.
    """
    report = Report.read(folder).data
    renderings: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "html": render_html,
        "md": render_markdown,
        "csv": report_csv,
        "json": lambda data: json.dumps(data, indent=1, ensure_ascii=False),
    }
    return renderings[as_format](report).rstrip("\n")
