"""The form `standalone`: graphs, tokenizer and one file of Python that answers with them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from smelt.core.artifact import Artifact
from smelt.export.package.form import HowTo, Origin, Takes
from smelt.export.package.write import copy_artifact


class Standalone:
    """onnxruntime, numpy and a tokenizer's library are all that it needs."""

    name: ClassVar[str] = "standalone"
    summary: ClassVar[str] = "graphs, tokenizer and infer.py, which needs onnxruntime, numpy and a tokenizer"
    takes: ClassVar[Takes] = Takes(
        formats=frozenset({"onnx"}),
        targets=frozenset({"ort-cpu"}),
        mend="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
    )
    keeps: ClassVar[bool] = True

    def check(self, artifact: Artifact) -> None:
        """Take every artifact that `takes` allows."""

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Copy the artifact."""
        copy_artifact(artifact, folder)
        return HowTo('smelt predict . "TEXT"', (), ())
