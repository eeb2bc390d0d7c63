"""The interface of package formats, and the information they get about an artifact.

A format is one class in one file and one line in `registry.py`. Code common to all formats (atomic folder,
README.md, SHA256SUMS, manifest) is in `smelt.export.package.write_package`. `smelt package --help`
imports these files, so onnx, onnxruntime, tokenizers and similar libraries are imported inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from smelt.core.artifact import Artifact, Format
from smelt.core.messages import Message
from smelt.data.tasks import task_traits, tasks_with


@dataclass(frozen=True)
class SupportedArtifacts:
    """The artifacts that a format supports, by their manifest and config.json; None: all.

    formats: torch, onnx, tensorrt. targets: of an export (`onnx: {target: ...}`). tasks: as in a recipe.
    families: the config's `model_type`. hint: what to add to a recipe for a supported artifact, the end of a
    message. fixed_shapes: whether graphs may have them.
    """

    formats: frozenset[Format]
    targets: frozenset[str] | None = None
    tasks: frozenset[str] | None = None
    families: frozenset[str] | None = None
    hint: str = ""
    fixed_shapes: bool = False


TEXT_GRAPHS = SupportedArtifacts(
    formats=frozenset({"onnx"}),
    targets=frozenset({"ort-cpu"}),
    tasks=frozenset(
        task
        for task in tasks_with(modality="text")
        if task_traits(task).output in ("text", "next-token", "labels", "embedding")
    ),
    hint="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
)


@dataclass(frozen=True)
class OriginStep:
    """One step from the model to the artifact. settings: those in the recipe."""

    name: str
    stage: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OriginScore:
    """One metric of the artifact and of the unmodified model, as text (None if unknown).

    text: with its 95 % interval. n: number of examples (tokens, for language models). signature: how it is
    computed. key: the metric's name in a report. value: the number itself.
    """

    metric: str
    text: str
    baseline: str | None
    n: int
    signature: str
    key: str = ""
    value: float | None = None


@dataclass(frozen=True)
class PackageOrigin:
    """The origin of an artifact: information from the run that produced it.

    run: the recipe's name; None if the run is unknown (an artifact that was copied), and then the rest is
    empty. model: the recipe's model, license: from its folder. steps: from the model to the artifact.
    data: the data of the scores, split: test or validation. generation: the recipe's `score.generation` of
    the scores. latencies: lines about latency. warnings: limits of the recipe that the step violates, and
    whether only a part of the samples was scored.
    """

    run: str | None = None
    model: str | None = None
    license: str | None = None
    steps: tuple[OriginStep, ...] = ()
    scores: tuple[OriginScore, ...] = ()
    latencies: tuple[str, ...] = ()
    data: str | None = None
    split: str = "test"
    warnings: tuple[Message, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UsageNotes:
    """How a package is used: for its README and the command line.

    install: one line that installs the requirements of `run`, run: one line that runs the model on a text,
    both for a shell in the package's folder. examples: blocks of code, (language, text), which work as they
    are. notes: further information, a sentence or paragraph each. front_matter: YAML that begins README.md,
    without its lines of dashes.
    """

    install: str
    run: str
    examples: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    front_matter: str = ""


class PackageFormat(Protocol):
    """A package format. name: the value of `--format`. summary: one line for the help.

    supported: the supported artifacts; further requirements are in `check`. is_artifact: whether the files of
    the artifact keep their names and paths, so that the package is also an artifact for `smelt predict`,
    `eval` and `bench`; it then gets a manifest.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    supported: ClassVar[SupportedArtifacts]
    is_artifact: ClassVar[bool]

    def check(self, artifact: Artifact) -> None:
        """Require that `artifact`, which `supported` allows, can be written in this format.

        Raises:
            InputError: it cannot; the message gives the reason. The caller (`require_supported`) adds which
                other format, or which other artifact of the run, fits.
        """

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write regular files into the empty `folder`; return the usage notes.

        Modes, README.md, SHA256SUMS and the manifest are added afterwards; on an error nothing remains.

        Raises:
            InputError: the artifact turns out not to fit.
            RunError: the result is not correct.
        """
