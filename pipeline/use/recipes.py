"""A recipe that is built in Python, or read from a file, for `smelt.run` and `smelt.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from smelt.core.errors import InputError
from smelt.core.files import write_atomically
from smelt.recipe.recipe import examine, find_recipe
from smelt.recipe.yaml_file import Document, parse_yaml, read_yaml

if TYPE_CHECKING:
    from smelt.planning.plan import Plan


class Recipe:
    """A recipe: the model, the task, the data, the stages, and what is scored.

        recipe = smelt.Recipe(
            model="models/my-translator",
            task="translation",
            data={"train": "train.jsonl", "test": "test.jsonl"},
            stages=[{"quantize": {"scheme": "int8-dynamic"}}, {"onnx": {}, "name": "onnx-int8"}],
        )

    It is checked when it is made, as the file of a recipe is: every mistake is reported together.

    Args:
        model, task, data, stages: as in the file.
        name: of the run; its folder is runs/NAME unless `smelt.run` is given another.
        base: the folder that paths in the recipe are relative to (default: the current one).
        **keys: the other keys of a recipe, such as `score`, `gates` and `seed`.

    Raises:
        InputError: every mistake that the values show.
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
        values = {"model": model, "task": task, "data": data, **keys, "stages": list(stages)}
        try:
            text = yaml.dump(_plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise InputError(f"{name}: a recipe holds texts, numbers, lists and mappings: {error}.",
                             code="wrong-value") from error  # fmt: skip
        self._read(text, Path(base).resolve() / f"{name}.yaml")

    @classmethod
    def from_yaml(cls, source: str | PathLike[str]) -> Recipe:
        """Read a recipe from a file, by the name of one that ships, or from a text of several lines.

        Raises:
            InputError: no such recipe, or every mistake in it.
        """
        made = cls.__new__(cls)
        if isinstance(source, str) and "\n" in source:
            made._read(source, Path.cwd() / "recipe.yaml")
        else:
            path = find_recipe(str(source))
            made._read(read_yaml(path).text, path.resolve())
        return made

    def to_yaml(self, path: str | PathLike[str] | None = None) -> str:
        """Return the recipe as YAML; also write it to `path` where one is given."""
        if path is not None:
            write_atomically(Path(path), self.text)
        return self.text

    def document(self) -> Document:
        """Return the recipe as a parsed document."""
        return parse_yaml(self.text, self.path.name)

    def _read(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        _, mistakes, _ = examine(self.document(), path, ())
        mistakes.raise_all()

    def __repr__(self) -> str:
        return f"Recipe({self.path.stem!r})\n{self.text}"


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: a recipe that names one list twice stays readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _plain(value: Any) -> Any:
    """Return `value` with paths as texts, and tuples and mappings as lists and dictionaries."""
    if isinstance(value, PathLike):
        return str(Path(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def plan_of(
    recipe: str | PathLike[str] | Recipe, overrides: Sequence[str] = (), until: str | None = None
) -> Plan:
    """Return the plan of a recipe: one in Python, a file, or the name of one that ships.

    Raises:
        InputError: every mistake in the recipe, the model's folder and the data.
    """
    from smelt.planning.load import load_plan, make_plan

    if isinstance(recipe, Recipe):
        return make_plan(recipe.document(), recipe.path, overrides, until)
    return load_plan(recipe if isinstance(recipe, str) else Path(recipe), overrides, until)
