"""The interface of a technique: a stage with typed settings, and the context that it runs in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from smelt.core.artifact import Artifact, FileRecord, Format, Manifest
from smelt.core.files import json_hash, resolve_path, sha256_of
from smelt.core.messages import Message, warning
from smelt.core.workspaces import temporary_workspace
from smelt.data.splits import Split, Task

Need = Literal["train", "unlabeled", "validation", "calibration", "cuda", "tensorrt"]


class Settings(BaseModel):
    """Base of every stage's settings: unknown names are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def step_references(self) -> dict[str, str]:
        """Return the names of other steps in these settings, by setting (`part.setting`)."""
        return {setting: name for setting, (name, _) in self._marked_references().items()}

    def any_format_references(self) -> frozenset[str]:
        """Return which of `step_references` may be steps with a model in another format than torch."""
        return frozenset(
            setting for setting, (_, mark) in self._marked_references().items() if mark.any_format
        )

    def folder_references(self) -> frozenset[str]:
        """Return which of `step_references` may be `{model: FOLDER}` instead."""
        return frozenset(
            setting for setting, (_, mark) in self._marked_references().items() if mark.or_folder
        )

    def _marked_references(self) -> dict[str, tuple[str, _ReferenceMarker]]:
        found: dict[str, tuple[str, _ReferenceMarker]] = {}
        for name, info in type(self).model_fields.items():
            mark = next((mark for mark in info.metadata if isinstance(mark, _ReferenceMarker)), None)
            for place, value in _tuple_items(getattr(self, name)):
                setting = ".".join([name, *map(str, place)])
                if isinstance(value, Settings):
                    found |= {
                        f"{setting}.{below}": reference
                        for below, reference in value._marked_references().items()
                    }
                elif isinstance(value, str) and mark is not None:
                    found[setting] = value, mark
        return found

    def resolve_for_task(self, task: Task) -> Self:
        """Return the settings with defaults that depend on the task; most settings have none."""
        return self

    def to_report(self) -> dict[str, Any]:
        """Return the settings for a report: as JSON, without unused ones.

        As settings in a recipe they are accepted and mean the same.
        """
        report = self.model_dump(mode="json")
        for name in report.keys() & type(self).model_fields.keys():
            value = getattr(self, name)
            if isinstance(value, Settings):
                report[name] = value.to_report()
            elif isinstance(value, list | tuple):
                report[name] = [
                    item.to_report() if isinstance(item, Settings) else dumped
                    for item, dumped in zip(value, report[name], strict=True)
                ]
        return report

    def required_packages(self) -> dict[str, str]:
        """Return the optional packages that these settings need, with their oldest releases."""
        return {}

    @property
    def replaces_model(self) -> bool:
        """Whether the result is another model, without any weights of the step's input."""
        return False

    def paths(self) -> dict[tuple[str | int, ...], str]:
        """Return the files and folders in these settings, by setting."""
        return {place: path for place, (path, _) in self._marked_paths().items()}

    def paths_to_models(self) -> dict[tuple[str | int, ...], bool]:
        """Return which of `paths` are model folders; true if the model is used unchanged."""
        return {place: mark.used_unchanged for place, (_, mark) in self._marked_paths().items() if mark.model}

    def _marked_paths(self) -> dict[tuple[str | int, ...], tuple[str, _PathMarker]]:
        found: dict[tuple[str | int, ...], tuple[str, _PathMarker]] = {}
        for name, info in type(self).model_fields.items():
            mark = next((mark for mark in info.metadata if isinstance(mark, _PathMarker)), None)
            for place, value in _tuple_items(getattr(self, name)):
                if isinstance(value, Settings):
                    found |= {
                        (name, *place, *below): marked for below, marked in value._marked_paths().items()
                    }
                elif isinstance(value, str) and mark is not None:
                    found[name, *place] = value, mark
        return found

    def resolve_paths(self, base: Path) -> Self:
        """Return the settings with paths relative to `base` made absolute."""
        changed: dict[str, Any] = {}
        for name in dict.fromkeys(str(place[0]) for place in self.paths()):
            value = getattr(self, name)
            if isinstance(value, tuple):
                changed[name] = tuple(v.resolve_paths(base) if isinstance(v, Settings) else v for v in value)
            elif isinstance(value, Settings):
                changed[name] = value.resolve_paths(base)
            else:
                changed[name] = str(absolute_path(resolve_path(base, value)))
        return self.model_copy(update=changed) if changed else self


def absolute_path(path: Path) -> Path:
    """Return `path` normalized; a link keeps its own name."""
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _tuple_items(value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the members of a tuple with their indices; for other values the value itself."""
    return [((at,), item) for at, item in enumerate(value)] if isinstance(value, tuple) else [((), value)]


FolderSettingsT = TypeVar("FolderSettingsT", bound=Settings)


@dataclass(frozen=True)
class _PathMarker:
    """Marks a setting that names a file or folder, relative to the recipe.

    model: a folder with a trained model. used_unchanged: the model must be complete.
    """

    model: bool = False
    used_unchanged: bool = False


@dataclass(frozen=True)
class _ReferenceMarker:
    """Marks a setting that names an earlier step, with a torch model unless `any_format`.

    or_folder: it may be `{model: FOLDER}` instead.
    """

    any_format: bool = False
    or_folder: bool = False


StepName = Annotated[str, _ReferenceMarker()]
# One such step, or several; also folders: settings with a `model`.
StepNames = Annotated[str | tuple[str | FolderSettingsT, ...], _ReferenceMarker(or_folder=True)]
# A step in any format that runs: its outputs are used, not its weights.
RunnableStep = Annotated[str | None, _ReferenceMarker(any_format=True)]
RecipePath = Annotated[Annotated[str, Field(min_length=1)] | None, _PathMarker()]
# A folder with a trained model: as initialization, or used unchanged.
ModelFolder = Annotated[Annotated[str, Field(min_length=1)] | None, _PathMarker(model=True)]
UnchangedModelFolder = Annotated[str, Field(min_length=1), _PathMarker(model=True, used_unchanged=True)]
# A setting of stages that write float weights; they always compute in float32.
StoredDtype = Annotated[
    Literal["keep", "fp32", "fp16", "bf16"],
    Field(description="type of stored float weights; keep: unchanged"),
]


class Progress(Protocol):
    """Reports the progress of long work."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units are finished; `note` is a short state (a loss)."""


def no_progress(done: int, total: int, note: str = "") -> None:
    """Report nothing."""


def no_log(text: str) -> None:
    """Log nothing."""


@contextmanager
def temporary_files(
    cache_key: Mapping[str, Any], make: Callable[[Path], None]
) -> Iterator[tuple[Path, bool]]:
    """Yield a temporary folder with the files of `make`, removed when the context ends."""
    with temporary_workspace() as folder:
        make(folder)
        yield folder, False


@dataclass(frozen=True)
class Context:
    """The environment of a stage, apart from its source and settings; never the test data.

    out: an empty folder; its content becomes the artifact.
    data: train, unlabeled, validation, calibration, if the recipe names them.
    ancestors: the finished artifacts above this step and those that its settings name as a `StepName`,
        by step name (`model` is the original one).
    score: scores of an artifact on the validation data, or on the samples of a second argument, by metric
        name; higher is better: metrics in `negated_metrics` have the opposite sign.
    device: auto, cpu or cuda: where to train; auto is CUDA if torch finds one.
    launch: the settings of several processes that train together
        (`smelt.training.processes.LaunchSettings`); None for one process.
    cached_value: returns the result of a function (JSON), computed once for everything that it depends on and
        cached in the store, for use by several steps.
    cached_files: the same for large results: yields a folder with the files that a function wrote into an
        empty one, and whether they were cached. `cache_key` names everything that they depend on; its
        "what" describes them, its "artifacts" lists the keys of their source artifacts.
    next_checkpoint_folder: returns the folder for checkpoints of the stage's next training, the same in every
        run of the step; None if none are written. It is removed when the step is done.
    checkpoint_saved: called with that folder after each checkpoint.
    log_metrics: receives a point of the training curves: metrics by name, and the update.
    log: writes a line to the run's log.
    warnings, details: of this step, for the report; the stage adds to them.
    """

    out: Path
    task: Task
    data: Mapping[str, Split]
    seed: int
    ancestors: Mapping[str, Artifact]
    score: Callable[..., Mapping[str, float]]
    negated_metrics: frozenset[str] = frozenset()
    progress: Progress = no_progress
    threads: int | None = None
    device: str = "auto"
    launch: Any = None
    cached_value: Callable[[Mapping[str, Any], Callable[[], Any]], Any] = lambda what, make: make()
    cached_files: Callable[
        [Mapping[str, Any], Callable[[Path], None]], AbstractContextManager[tuple[Path, bool]]
    ] = temporary_files
    next_checkpoint_folder: Callable[[], Path | None] = lambda: None
    checkpoint_saved: Callable[[Path], None] = lambda folder: None
    log_metrics: Callable[[Mapping[str, float], int], None] = lambda metrics, update: None
    log: Callable[[str], None] = no_log
    warnings: list[Message] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def warn(self, code: str, message: str, *, setting: str | None = None, file: str | None = None) -> None:
        """Add a warning about this step, for the report."""
        self.warnings.append(warning(code, message, setting=setting, file=file))


SettingsT_contra = TypeVar("SettingsT_contra", bound=Settings, contravariant=True)


class Stage(Protocol[SettingsT_contra]):
    """One technique. The docstring of the class is what `smelt stages NAME` prints.

    needs: all data that it may need; if that depends on the settings, the class also has a class method
        `needs_with(settings, given)` (see `stage_needs`).
    settings_type: the stage's own subclass of `Settings`.
    provides, invalidates: optional class methods of the settings: results of a step that a later one may
        lose, by name, and results that a step loses, by name, with advice (smelt.pipeline.plan.step_draft).
    prunes_units: optional; true for a stage that removes single heads or neurons.
    unit_pruning_error(settings): optional; why units of its result cannot be removed, None if they can.
    needs_float: optional; true for a stage that changes float weights, which a quantized model lacks.
    estimate_cost(settings, inputs): optional; the estimated cost of the step (`smelt.models.costs`).
    lighter_settings(settings): optional; settings that need less memory, with their text for users.
    quantized_input_error(settings, codes): optional; for other stages that change weights, why it cannot
        change those of a quantized model (`smelt.compress.model_input.QuantizedInput`), None if it can.
    version: raised whenever the stage computes another result from the same input; part of the key.
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

        The pipeline turns `ctx.out` into an artifact with `Store.commit` when this returns; after an
        exception nothing is stored.
        """


def stage_needs(
    stage: type[Stage[Any]], settings: Settings, available: Collection[str] = ()
) -> frozenset[Need]:
    """Return the data that `stage` needs with these settings if the recipe has the splits `available`."""
    narrower = getattr(stage, "needs_with", None)
    found: frozenset[Need] = narrower(settings, available) if narrower else stage.needs
    return found


def candidate_artifact(folder: Path, src: Artifact, ctx: Context) -> Artifact:
    """Return the torch model in `folder`, derived from `src`, as an artifact keyed by its file hashes."""
    files = {
        path.relative_to(folder).as_posix(): FileRecord(
            sha256=sha256_of(path), size_bytes=path.stat().st_size
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(
        key=json_hash({name: record.sha256 for name, record in files.items()}),
        format="torch",
        task=ctx.task,
        stage="checkpoint",
        settings={},
        seed=ctx.seed,
        parent=src.key,
        versions=dict(src.manifest.versions),
        files=files,
    )
    return Artifact(folder, manifest)
