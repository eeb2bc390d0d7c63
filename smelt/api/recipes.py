"""Build a recipe in Python, or read one from a file, for `smelt.run` and `smelt.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from smelt.core.errors import InputError, combined_error
from smelt.core.files import write_atomically
from smelt.core.messages import error_message
from smelt.inspect.onnx_files import is_onnx
from smelt.recipe.mistakes import dotted_path, validate_settings, value_text
from smelt.recipe.recipe import check_recipe, find_recipe
from smelt.recipe.stage_table import ONNX_EQUIVALENTS, load_stage
from smelt.recipe.yaml_file import KeyPath, YamlDocument, parse_yaml, read_yaml

if TYPE_CHECKING:
    from smelt.planning.plan import Plan


class Recipe:
    """A recipe: model, task, data, stages, and scoring.

        recipe = smelt.Recipe(
            model="models/my-translator",
            task="translation",
            data={"train": "train.jsonl", "test": "test.jsonl"},
            stages=[{"quantize": {"scheme": "int8-dynamic"}}, {"onnx": {}, "name": "onnx-int8"}],
        )

    The values are checked on construction, as for a recipe file; all mistakes are reported together.

    Args:
        model, task, data, stages: as in a recipe file.
        name: name of the run; its folder is runs/NAME unless `out` of `smelt.run` is set.
        base: the folder that paths in the recipe are relative to (default: the current one).
        **keys: the other keys of a recipe, such as `score`, `gates` and `seed`.

    Raises:
        InputError: values are invalid; the message lists every mistake.
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
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        self._read(text, Path(base).expanduser().resolve() / f"{name}.yaml")

    @classmethod
    def from_yaml(cls, source: str | PathLike[str]) -> Recipe:
        """Read a recipe from a file, by the name of an included recipe, or from a multi-line string.

        Raises:
            InputError: no such recipe, or it has mistakes; the message lists every mistake.
        """
        made = cls.__new__(cls)
        if isinstance(source, str) and "\n" in source:
            made._read(source, Path.cwd() / "recipe.yaml")
        else:
            path = find_recipe(str(source))
            made._read(read_yaml(path).text, path.resolve())
        return made

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
        recipe, mistakes, _ = check_recipe(self.document(), path, ())
        on_graphs = ONNX_EQUIVALENTS if is_onnx(recipe.model, recipe.base) else {}
        for entry in recipe.stages:
            if entry.has_settings:
                cls = load_stage(on_graphs.get(entry.stage, entry.stage))
                validate_settings(cls.settings_type, entry.settings, entry.path, mistakes)
        mistakes.raise_if_any()

    def __repr__(self) -> str:
        return f"Recipe({self.path.stem!r})\n{self.text}"


class _Dumper(yaml.SafeDumper):
    """Writes lists that occur twice in full, without YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
        return {str(key): to_plain(part, (*where, str(key))) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part, (*where, number)) for number, part in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    text = f"{dotted_path(where)}: expected strings, numbers, lists and mappings, got {value_text(value)}."
    raise combined_error([error_message("wrong-value", text, setting=dotted_path(where))])


def plan_recipe(
    recipe: str | PathLike[str] | Recipe, overrides: Sequence[str] = (), until: str | None = None
) -> Plan:
    """Return the plan of a recipe: a `Recipe`, a file, or the name of an included recipe.

    Raises:
        InputError: there are mistakes in the recipe, the model's folder or the data; lists all of them.
    """
    from smelt.planning.load_plan import load_plan, make_plan

    if isinstance(recipe, Recipe):
        return make_plan(recipe.document(), recipe.path, overrides, until)
    return load_plan(recipe if isinstance(recipe, str) else Path(recipe), overrides, until)
