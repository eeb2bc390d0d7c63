"""What a technique is: a stage with typed settings, and what it is given to work with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from smelt.core.artifact import Artifact, Format
from smelt.core.data import Split, Task
from smelt.core.files import placed
from smelt.core.messages import Message, warning

Need = Literal["train", "unlabelled", "validation", "calibration", "cuda", "tensorrt"]


class Settings(BaseModel):
    """Base of every stage's settings: unknown names are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def references(self) -> dict[str, str]:
        """Return the names of other steps that these settings speak of, by setting (`part.setting`)."""
        return {setting: name for setting, (name, _) in self._named().items()}

    def of_any_format(self) -> frozenset[str]:
        """Return which of `references` may be steps whose model has left torch."""
        return frozenset(setting for setting, (_, mark) in self._named().items() if mark.any_format)

    def or_folders(self) -> frozenset[str]:
        """Return which of `references` may be `{model: FOLDER}` instead."""
        return frozenset(setting for setting, (_, mark) in self._named().items() if mark.or_folder)

    def _named(self) -> dict[str, tuple[str, _Reference]]:
        found: dict[str, tuple[str, _Reference]] = {}
        for name, info in type(self).model_fields.items():
            mark = next((mark for mark in info.metadata if isinstance(mark, _Reference)), None)
            for place, value in _leaves(getattr(self, name)):
                setting = ".".join([name, *map(str, place)])
                if isinstance(value, Settings):
                    found |= {f"{setting}.{below}": said for below, said in value._named().items()}
                elif isinstance(value, str) and mark is not None:
                    found[setting] = value, mark
        return found

    def for_task(self, task: Task) -> Self:
        """Return the same, where what was left to the task is decided; most settings leave nothing to it."""
        return self

    def meant(self) -> dict[str, Any]:
        """Return what a report says of them: as JSON, without what nothing uses beside the others."""
        return self.model_dump(mode="json")

    def packages(self) -> dict[str, str]:
        """Return what these settings need besides what smelt depends on: packages and oldest releases."""
        return {}

    @property
    def begins_anew(self) -> bool:
        """Whether the step goes on with another model, in which nothing stays of the one that it gets."""
        return False

    def paths(self) -> dict[tuple[str | int, ...], str]:
        """Return the files and folders that these settings name, by setting."""
        return {place: path for place, (path, _) in self._marked().items()}

    def models(self) -> dict[tuple[str | int, ...], bool]:
        """Return which of `paths` are folders of models; true where the model is used as it is there."""
        return {place: mark.as_it_is for place, (_, mark) in self._marked().items() if mark.model}

    def _marked(self) -> dict[tuple[str | int, ...], tuple[str, _Path]]:
        found: dict[tuple[str | int, ...], tuple[str, _Path]] = {}
        for name, info in type(self).model_fields.items():
            mark = next((mark for mark in info.metadata if isinstance(mark, _Path)), None)
            for place, value in _leaves(getattr(self, name)):
                if isinstance(value, Settings):
                    found |= {(name, *place, *below): said for below, said in value._marked().items()}
                elif isinstance(value, str) and mark is not None:
                    found[name, *place] = value, mark
        return found

    def below(self, base: Path) -> Self:
        """Return the same with paths that are relative to `base` made absolute."""
        changed: dict[str, Any] = {}
        for name in dict.fromkeys(str(place[0]) for place in self.paths()):
            value = getattr(self, name)
            if isinstance(value, tuple):
                changed[name] = tuple(v.below(base) if isinstance(v, Settings) else v for v in value)
            elif isinstance(value, Settings):
                changed[name] = value.below(base)
            else:
                changed[name] = str(_direct(placed(base, value)))
        return self.model_copy(update=changed) if changed else self


def _direct(path: Path) -> Path:
    """Return `path` without detours; where it is a link, by its own name."""
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _leaves(value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the members of a tuple by their places; of anything else itself."""
    return [((at,), one) for at, one in enumerate(value)] if isinstance(value, tuple) else [((), value)]


OtherT = TypeVar("OtherT", bound=Settings)


@dataclass(frozen=True)
class _Path:
    """Marks a setting that names a file or folder, relative to the recipe.

    model: a folder with a trained model. as_it_is: which has to have all that it is used for.
    """

    model: bool = False
    as_it_is: bool = False


@dataclass(frozen=True)
class _Reference:
    """Marks a setting whose value names an earlier step, one that gives a torch model unless `any_format`.

    or_folder: it may be `{model: FOLDER}` instead.
    """

    any_format: bool = False
    or_folder: bool = False


StepName = Annotated[str, _Reference()]
# One such step, or several, among which may be folders: settings with a `model`.
StepNames = Annotated[str | tuple[str | OtherT, ...], _Reference(or_folder=True)]
# The same, of a step in any format that runs: what it says counts, and not its weights.
RunningStep = Annotated[str | None, _Reference(any_format=True)]
RecipePath = Annotated[Annotated[str, Field(min_length=1)] | None, _Path()]
# A folder with a trained model: of which another one is made, or that is used as it is.
ModelFolder = Annotated[Annotated[str, Field(min_length=1)] | None, _Path(model=True)]
UsedModel = Annotated[str, Field(min_length=1), _Path(model=True, as_it_is=True)]
# A setting of stages that write float weights; they compute in float32 whatever it is.
StoredDtype = Annotated[
    Literal["keep", "fp32", "fp16", "bf16"],
    Field(description="type of stored float weights; keep: unchanged"),
]


class Progress(Protocol):
    """Where long work says how far it is."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units are finished; `note` is a short state (a loss)."""


def silent(done: int, total: int, note: str = "") -> None:
    """A `Progress` that says nothing."""


def unheard(text: str) -> None:
    """Say nothing."""


@contextmanager
def made_anew(what: Mapping[str, Any], make: Callable[[Path], None]) -> Iterator[tuple[Path, bool]]:
    """Make files where nothing keeps them: they go when the context ends."""
    with tempfile.TemporaryDirectory(prefix="smelt-") as folder:
        make(Path(folder))
        yield Path(folder), False


@dataclass(frozen=True)
class Context:
    """What a stage may use besides its source and its settings; never the test data.

    out: an empty folder; what the stage leaves there becomes the artifact.
    data: train, unlabelled, validation, calibration, as far as the recipe names them.
    ancestors: the finished artifacts above this step and those that its settings name as a `StepName`,
        by step name (`model` is the untouched one).
    score: quality of an artifact on the validation data, or on a second argument's rows of them, by metric
        name; higher is better: of a metric in `turned` the sign is turned round.
    device: auto, cpu or cuda: where to train; auto is CUDA where torch sees one.
    kept: gives what a function makes (JSON), made once for all that it depends on, and kept beside the
        artifacts: what a teacher says of all rows serves more than one step.
    files: the same for large results: gives, while it is entered, a folder with the files that a function put
        into an empty one, and whether they were there already. `what` names all that they depend on; its
        "what" says in words what they are, its "artifacts" lists the keys of those that they are made of.
    unfinished: gives a folder for the checkpoints of the stage's next training, the same in every run of the
        step; None where none are kept. It goes when the step is done.
    logs: a folder of the run in which trackers of experiments write; None without a run.
    say: writes a line into the run's log.
    warnings, details: what the report should tell of this step; the stage adds to them.
    """

    out: Path
    task: Task
    data: Mapping[str, Split]
    seed: int
    ancestors: Mapping[str, Artifact]
    score: Callable[..., Mapping[str, float]]
    turned: frozenset[str] = frozenset()
    progress: Progress = silent
    threads: int | None = None
    device: str = "auto"
    kept: Callable[[Mapping[str, Any], Callable[[], Any]], Any] = lambda what, make: make()
    files: Callable[
        [Mapping[str, Any], Callable[[Path], None]], AbstractContextManager[tuple[Path, bool]]
    ] = made_anew
    unfinished: Callable[[], Path | None] = lambda: None
    logs: Path | None = None
    say: Callable[[str], None] = unheard
    warnings: list[Message] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def warn(self, code: str, message: str, *, setting: str | None = None, file: str | None = None) -> None:
        """Add a warning about this step, for the report."""
        self.warnings.append(warning(code, message, setting=setting, file=file))


SettingsT_contra = TypeVar("SettingsT_contra", bound=Settings, contravariant=True)


class Stage(Protocol[SettingsT_contra]):
    """One technique. The docstring of the class is what `smelt stages NAME` prints.

    needs: all that it may need; where that depends on the settings, the class has a class method
        `needs_with(settings, given)` besides (see `needs_of`).
    settings_type: the stage's own subclass of `Settings`.
    leaves, spoils: optional class methods of the settings: what a step leaves that a later one may lose, by
        a word, and what a step loses of it, by the word with what to do instead (smelt.planning.order.lost).
    cuts_units: optional; true for a stage that takes single heads or neurons.
    holds_units(settings): optional; why none can be taken from what it leaves, None where they can.
    needs_float: optional; true for a stage that changes float weights, which a quantized model no longer has.
    unfit_for_codes(settings, codes): optional; of another stage that changes weights, why it cannot change
        those of a quantized model (`smelt.compress.behind_codes.CodesBefore`), None where it can.
    version: raised whenever the stage computes something else from the same input; part of the key.
    """

    name: ClassVar[str]
    accepts: ClassVar[frozenset[Format]]
    produces: ClassVar[Format]
    needs: ClassVar[frozenset[Need]]
    source: ClassVar[str]
    version: ClassVar[int]
    settings_type: ClassVar[type[Settings]]
    tasks: ClassVar[frozenset[Task]]

    def __call__(self, src: Artifact, settings: SettingsT_contra, ctx: Context) -> None:
        """Write the result of the technique on `src` into `ctx.out`.

        The pipeline turns `ctx.out` into an artifact with `Store.commit` once this returns; an
        exception leaves nothing behind.
        """


def needs_of(stage: type[Stage[Any]], settings: Settings, given: Collection[str] = ()) -> frozenset[Need]:
    """Return what `stage` needs with these settings where the recipe names the splits `given`."""
    narrower = getattr(stage, "needs_with", None)
    found: frozenset[Need] = narrower(settings, given) if narrower else stage.needs
    return found
