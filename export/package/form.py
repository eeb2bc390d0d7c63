"""What a form of package says of itself, and what it is told of the artifact.

A form is one class in one file and one line in `registry.py`. What is the same for all of them (the folder
that is complete or absent, README.md, SHA256SUMS, the manifest) is written once, around the form
(`smelt.export.package.write`). `smelt package --help` reads these files: onnx, onnxruntime, tokenizers and
their like are imported inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from smelt.core.artifact import Artifact, Format
from smelt.core.data import TEXT_TASKS
from smelt.core.messages import Message


@dataclass(frozen=True)
class Takes:
    """Which artifacts a form is for, as far as their manifest and config.json say it; None: all.

    formats: torch, onnx, tensorrt. targets: of an export (`onnx: {target: ...}`). tasks: as in a recipe.
    families: the config's `model_type`. mend: what to add to a recipe for an artifact that it takes, the end
    of a message.
    """

    formats: frozenset[Format]
    targets: frozenset[str] | None = None
    tasks: frozenset[str] | None = None
    families: frozenset[str] | None = None
    mend: str = ""


GRAPHS_OF_TEXTS = Takes(
    formats=frozenset({"onnx"}),
    targets=frozenset({"ort-cpu"}),
    tasks=frozenset(TEXT_TASKS),
    mend="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
)


@dataclass(frozen=True)
class Step:
    """One step of the way from the model to the artifact. settings: those that the recipe names."""

    name: str
    stage: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """One metric of the artifact, as text, beside the untouched model's (None where it is not known).

    text: with its 95 % interval. n: how many examples (tokens, of language models). signature: how. key: the
    metric as a report calls it. value: the number itself.
    """

    metric: str
    text: str
    baseline: str | None
    n: int
    signature: str
    key: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Origin:
    """What is known of an artifact beyond its own folder: what the run that made it holds.

    run: the recipe's name; None where the run is not known (an artifact that was copied away), and then the
    rest is empty. model: what the recipe began with, licence: what that model's folder says. steps: from the
    model to the artifact. data: what the scores are of, split: test or validation. generation: the recipe's
    `score.generation`, with which the scores were made. times: lines about latency. doubts: limits of the
    recipe that the step does not keep, and that it was scored on some of the rows alone.
    """

    run: str | None = None
    model: str | None = None
    licence: str | None = None
    steps: tuple[Step, ...] = ()
    scores: tuple[Score, ...] = ()
    times: tuple[str, ...] = ()
    data: str | None = None
    split: str = "test"
    doubts: tuple[Message, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HowTo:
    """How a package is used: what its README says and the command line prints.

    install: one line that installs what `run` needs, run: one line that answers a text, both for a shell in
    the package's folder. load: blocks of code, (language, text), each as it can be run there. notes: what
    else a user should know, a sentence or paragraph each. front: YAML that README.md begins with, without its
    lines of dashes.
    """

    install: str
    run: str
    load: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    front: str = ""


class Form(Protocol):
    """A form of package. name: the value of `--format`. summary: one line for the help.

    takes: which artifacts it is for; what that cannot say is asked of `check`. keeps: whether the files of
    the artifact keep their names and places, so that the package is an artifact too, which `smelt predict`,
    `eval` and `bench` take; it then gets a manifest.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    takes: ClassVar[Takes]
    keeps: ClassVar[bool]

    def check(self, artifact: Artifact) -> None:
        """Require that `artifact`, which `takes` allows, can be written in this form.

        Raises:
            InputError: it cannot; the message says why. Which other form takes it, or which other artifact of
                the run this form takes, is found and added by who calls (`fit.py`).
        """

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Write real files into the empty `folder`; say how they are used.

        Modes, README.md, SHA256SUMS and the manifest are made after it; what it raises leaves nothing behind.

        Raises:
            InputError: only now it showed that it cannot be done.
            RunError: what was made is not right.
        """
