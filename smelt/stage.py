"""The interface of a technique: a stage with typed settings, and the context that it runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from smelt.core.artifact import Artifact, FileRecord, Format, Manifest
from smelt.core.files import json_hash, resolve_path, sha256_of
from smelt.core.messages import Message, warning
from smelt.core.workspaces import temporary_workspace
from smelt.data.splits import Split
from smelt.data.tasks import ALL_TASKS, Task, TaskTraits, task_traits

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
            setting for setting, (_, marker) in self._marked_references().items() if marker.any_format
        )

    def folder_references(self) -> frozenset[str]:
        """Return which of `step_references` may be `{model: FOLDER}` instead."""
        return frozenset(
            setting for setting, (_, marker) in self._marked_references().items() if marker.or_folder
        )

    def _marked_references(self) -> dict[str, tuple[str, _ReferenceMarker]]:
        references: dict[str, tuple[str, _ReferenceMarker]] = {}
        for name, info in type(self).model_fields.items():
            marker = next((marker for marker in info.metadata if isinstance(marker, _ReferenceMarker)), None)
            for item_path, value in _tuple_items(getattr(self, name)):
                setting = ".".join([name, *map(str, item_path)])
                if isinstance(value, Settings):
                    references |= {
                        f"{setting}.{sub_setting}": reference
                        for sub_setting, reference in value._marked_references().items()
                    }
                elif isinstance(value, str) and marker is not None:
                    references[setting] = value, marker
        return references

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
                    item.to_report() if isinstance(item, Settings) else json_item
                    for item, json_item in zip(value, report[name], strict=True)
                ]
        return report

    def to_plan(self) -> dict[str, Any]:
        """Return what a plan shows: as JSON, the settings that differ from the defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def required_packages(self) -> dict[str, str]:
        """Return the optional packages that these settings need, with their oldest releases."""
        return {}

    @property
    def replaces_model(self) -> bool:
        """Whether the result is another model, without any weights of the step's input."""
        return False

    @property
    def changes_quantized_weights(self) -> bool:
        """Whether training with these settings changes the weights of a quantized model."""
        return False

    @property
    def is_machine_dependent(self) -> bool:
        """Whether the result depends on the machine that produces it."""
        return False

    def paths(self) -> dict[tuple[str | int, ...], str]:
        """Return the files and folders in these settings, by setting."""
        return {setting_path: path for setting_path, (path, _) in self._marked_paths().items()}

    def paths_to_models(self) -> dict[tuple[str | int, ...], bool]:
        """Return which of `paths` are model folders; true if the model is used unchanged."""
        return {
            setting_path: marker.used_unchanged
            for setting_path, (_, marker) in self._marked_paths().items()
            if marker.model
        }

    def _marked_paths(self) -> dict[tuple[str | int, ...], tuple[str, _PathMarker]]:
        paths: dict[tuple[str | int, ...], tuple[str, _PathMarker]] = {}
        for name, info in type(self).model_fields.items():
            marker = next((marker for marker in info.metadata if isinstance(marker, _PathMarker)), None)
            for item_path, value in _tuple_items(getattr(self, name)):
                if isinstance(value, Settings):
                    paths |= {
                        (name, *item_path, *sub_path): marked
                        for sub_path, marked in value._marked_paths().items()
                    }
                elif isinstance(value, str) and marker is not None:
                    paths[name, *item_path] = value, marker
        return paths

    def resolve_paths(self, base: Path, find_model: Callable[[Path], Path] = lambda path: path) -> Self:
        """Return the settings with paths relative to `base` made absolute.

        find_model: returns the folder of the model that a path names, such as that of a merged adapter.
        """
        resolved: dict[str, Any] = {}
        models = self.paths_to_models()
        for name in dict.fromkeys(str(setting_path[0]) for setting_path in self.paths()):
            value = getattr(self, name)
            if isinstance(value, tuple):
                resolved[name] = tuple(
                    v.resolve_paths(base, find_model) if isinstance(v, Settings) else v for v in value
                )
            elif isinstance(value, Settings):
                resolved[name] = value.resolve_paths(base, find_model)
            else:
                path = absolute_path(resolve_path(base, value))
                resolved[name] = str(find_model(path) if (name,) in models else path)
        return self.model_copy(update=resolved) if resolved else self


def absolute_path(path: Path) -> Path:
    """Return `path` normalized; a link keeps its own name."""
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _tuple_items(value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the members of a tuple with their indices; for other values the value itself."""
    return (
        [((index,), item) for index, item in enumerate(value)] if isinstance(value, tuple) else [((), value)]
    )


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

    @property
    def traits(self) -> TaskTraits:
        """The traits of the task."""
        return task_traits(self.task)

    def warn(self, code: str, message: str, *, setting: str | None = None, file: str | None = None) -> None:
        """Add a warning about this step, for the report."""
        self.warnings.append(warning(code, message, setting=setting, file=file))


@dataclass(frozen=True)
class QuantizedInput:
    """The quantized linear layers of a step's input model.

    schemes: their schemes. has_corrections: whether they have low-rank corrections. is_split: whether they
    are halves of split layers.
    """

    schemes: tuple[str, ...]
    has_corrections: bool = False
    is_split: bool = False


SettingsT = TypeVar("SettingsT", bound=Settings)


class Stage(ABC, Generic[SettingsT]):
    """One technique: facts and hooks for the plan, and `__call__` for the run.

    A stage sets `name`, `source`, `version`, `settings_type`, and what differs from the defaults below. The
    docstring of its class is what `smelt stages NAME` prints. The plan calls the hooks before a run, without
    torch, with checked settings; a hook that a stage does not override has no effect. Errors are returned as
    messages (`smelt.core.messages.error_message`) with the setting that they are about.

    Attributes:
        name: the stage in recipes.
        source: papers and software that it follows.
        version: increased whenever the same input gives another result; part of an artifact's key.
        settings_type: the stage's own subclass of `Settings`.
        accepts: formats of its input.
        produces: format of its output.
        tasks: tasks that it supports.
        needs: data and hardware that it always needs.
        may_need: data that it needs with some settings (`needs_with`).
        needs_float: whether it needs float weights, which a quantized model lacks.
        needs_float32: whether it needs weights of more than 16 bits.
        changes_quantized_weights: whether it changes the weights of a quantized model, without training.
        prunes_units: whether it removes single heads or neurons.
        trains_weights: whether it can train a model with random weights.
        changes_weights: whether its work is lost in a later step whose student is another model.
        imported_only: whether it is only for recipes that start from an ONNX model.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    version: ClassVar[int]
    settings_type: ClassVar[type[Settings]]
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    tasks: ClassVar[frozenset[Task]] = frozenset(ALL_TASKS)
    needs: ClassVar[frozenset[Need]] = frozenset()
    may_need: ClassVar[frozenset[Need]] = frozenset()
    needs_float: ClassVar[bool] = False
    needs_float32: ClassVar[bool] = False
    changes_quantized_weights: ClassVar[bool] = False
    prunes_units: ClassVar[bool] = False
    trains_weights: ClassVar[bool] = False
    changes_weights: ClassVar[bool] = True
    imported_only: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, src: Artifact, settings: SettingsT, ctx: Context) -> None:
        """Write the result of the technique on `src` into `ctx.out`.

        The pipeline turns `ctx.out` into an artifact with `Store.commit` when this returns; after an
        exception nothing is stored.
        """

    @classmethod
    def needs_with(cls, settings: SettingsT, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data and hardware that the step needs if the recipe has the splits `available`.

        Called for every step, before its data is checked.
        """
        return cls.needs

    @classmethod
    def check_model(
        cls, settings: SettingsT, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors for a model with this `config`, and the config of the output model.

        Called for every step whose input config is known, parents first. An unchanged config is returned as
        the same object.
        """
        return [], config

    @classmethod
    def check_teachers(
        cls, settings: SettingsT, config: Mapping[str, Any], teachers: Mapping[str, Mapping[str, Any]]
    ) -> list[Message]:
        """Return the errors regarding the steps that settings name.

        Called after `check_model` if that returns none. `config` is that of the output model; `teachers` are
        the known configs of the named steps, by setting.
        """
        return []

    @classmethod
    def check_rows(cls, settings: SettingsT, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return the errors regarding the task, and the samples of those splits that were read.

        Called for every step after the data is checked.
        """
        return []

    @classmethod
    def check_graph(cls, settings: SettingsT, graph: Path) -> list[Message]:
        """Return the errors regarding the third-party graph in the ONNX file `graph`.

        Called for every step that gets the original model, if that is one graph, which was validated.
        """
        return []

    @classmethod
    def required_metrics(cls, settings: SettingsT) -> list[tuple[str, str]]:
        """Return (setting, metric) for each metric that settings name; the recipe must score them.

        Called for every step if the scored metrics are known.
        """
        return []

    @classmethod
    def quantized_input_error(cls, settings: SettingsT, quantized: QuantizedInput) -> str | None:
        """Return why the step cannot change quantized weights, and what to do; None if it can.

        Called for steps after `quantize`, or of a model with quantized weights.
        """
        return None

    @classmethod
    def unit_pruning_error(cls, settings: SettingsT) -> str | None:
        """Return why units of the step's result cannot be removed; None if they can.

        Called for the ancestors of steps that remove heads or neurons.
        """
        return None

    @classmethod
    def provides(cls, settings: SettingsT) -> frozenset[str]:
        """Return the names of the step's results that a later step may lose, such as `zeros`."""
        return frozenset()

    @classmethod
    def invalidates(cls, settings: SettingsT) -> Mapping[str, str]:
        """Return which results of earlier steps (`provides`) the step loses, with advice.

        Called for every step; `{step}` in the advice is replaced by the name of the earlier step.
        """
        return {}

    @classmethod
    def poor_order(cls, settings: SettingsT, earlier: Mapping[str, Settings]) -> str | None:
        """Return why the step gives poor results after the stages `earlier`, and what to do; None if not.

        Called for every step with the stages of its ancestors, and the settings of the nearest of each.
        """
        return None

    @classmethod
    def check_size(cls, settings: SettingsT, size: Any) -> list[Message]:
        """Return the errors for a model of this `smelt.models.model_size.ModelSize`.

        Called for steps on the original model, if it has all weights of its config and no others: only then
        is the size certain.
        """
        return []

    @classmethod
    def estimate_size(cls, settings: SettingsT, inputs: Any) -> Any:
        """Return the sizes of a step, a `smelt.models.model_size.StepSize`; None: those of the model.

        Called for every step with its `smelt.models.model_size.SizeInputs`.
        """
        return None

    @classmethod
    def lighter_settings(cls, settings: SettingsT) -> Iterable[tuple[str, Settings]]:
        """Return settings that need less memory, with their text for users.

        Called if the estimated memory is more than the machine has.
        """
        return ()

    @classmethod
    def extra_help(cls) -> str:
        """Return what `smelt stages NAME` prints after the docstring."""
        return ""


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
