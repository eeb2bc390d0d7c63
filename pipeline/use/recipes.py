"""A recipe that is built in Python, or read from a file, for `smelt.run` and `smelt.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from smelt.core.errors import InputError, together
from smelt.core.files import write_atomically
from smelt.core.messages import mistake
from smelt.look.foreign import is_onnx
from smelt.recipe.errors import check, dotted, shown
from smelt.recipe.recipe import examine, find_recipe
from smelt.recipe.stage_table import ON_GRAPHS, load_stage
from smelt.recipe.yaml_file import Document, Where, parse_yaml, read_yaml

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
        if not isinstance(name, str) or not name.strip() or Path(name).name != name or name == "..":
            raise InputError(
                f"name: expected the name of a folder, such as my-model, read {name!r}.",
                code="wrong-value",
                setting="name",
            )
        values = plain({"model": model, "task": task, "data": data, **keys, "stages": stages})
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        self._read(text, Path(base).expanduser().resolve() / f"{name}.yaml")

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
        """Return the recipe as YAML; also write it to `path` where one is given.

        Raises:
            InputError: `path` cannot be written.
        """
        if path is not None:
            target = Path(path).expanduser()
            try:
                write_atomically(target, self.text)
            except OSError as error:
                raise InputError(
                    f"{target}: cannot be written: {error.strerror}. Give the path of a file.",
                    code="unwritable-file",
                    file=str(target),
                ) from error
        return self.text

    def document(self) -> Document:
        """Return the recipe as a parsed document."""
        return parse_yaml(self.text, self.path.name)

    def _read(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        recipe, mistakes, _ = examine(self.document(), path, ())
        on_graphs = ON_GRAPHS if is_onnx(recipe.model, recipe.base) else {}
        for entry in recipe.stages:
            if entry.settled:
                cls = load_stage(on_graphs.get(entry.word, entry.word))
                check(cls.settings_type, entry.settings, entry.path, mistakes)
        mistakes.raise_all()

    def __repr__(self) -> str:
        return f"Recipe({self.path.stem!r})\n{self.text}"


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: a recipe that names one list twice stays readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def plain(value: Any, where: Where = ()) -> Any:
    """Return `value` as YAML and JSON hold it: paths as texts, numbers of NumPy as numbers, tuples as lists.

    Raises:
        InputError: something else; the message names the setting.
    """
    if isinstance(value, PathLike):
        return str(Path(value))
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy
        return plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): plain(part, (*where, str(key))) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, (*where, number)) for number, part in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    text = f"{dotted(where)}: expected texts, numbers, lists and mappings, read {shown(value)}."
    raise together([mistake("wrong-value", text, setting=dotted(where))])


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
