"""The form `standalone`: the artifact as it is, and what runs and serves it without smelt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from smelt.core.artifact import Artifact
from smelt.core.data import IMAGES, SIMILARITY, TEXT_TASKS, TEXT_TO_TEXT
from smelt.core.errors import InputError
from smelt.core.files import write_json
from smelt.export.package.form import GRAPHS_OF_TEXTS, HowTo, Origin, Takes
from smelt.export.package.write import copy_artifact

INFER, SERVE, SETTINGS = "infer.py", "serve.py", "infer.json"
_GENERATES = (*TEXT_TO_TEXT, "language-modeling")
# the file in `parts` for a task, the class in it, and what a program does with the class
USES = {
    "translation": ("translation", "Translator", 'print(Translator()(["TEXT", "ANOTHER"]))'),
    "language-modeling": ("language_modeling", "Writer", 'print(Writer()(["TEXT", "ANOTHER"]))'),
    "text-classification": (
        "text_classification",
        "Classifier",
        'print(Classifier()(["TEXT", ("FIRST OF A PAIR", "SECOND")]))',
    ),
    SIMILARITY: ("sentence_similarity", "Embedder", 'print(Embedder()(["TEXT", "ANOTHER"]).shape)'),
    IMAGES: (
        "image_classification",
        "ImageClassifier",
        'print(ImageClassifier()(["photo.jpg"]))',
    ),
}


class Standalone:
    """onnxruntime, numpy and a tokenizer's library, or Pillow, are all that it needs."""

    name: ClassVar[str] = "standalone"
    summary: ClassVar[str] = "infer.py and a service beside the graphs: onnxruntime, numpy"
    takes: ClassVar[Takes] = replace(GRAPHS_OF_TEXTS, tasks=frozenset({*TEXT_TASKS, IMAGES}))
    keeps: ClassVar[bool] = True

    def check(self, artifact: Artifact) -> None:
        """Require a tokenizer that is read without transformers, and the loop inside of a graph; or images.

        Raises:
            InputError: it has not.
        """
        from smelt.export.package.standalone.settings import images
        from smelt.runtime.backends.backend import WHOLE
        from smelt.runtime.text.tokenizing_file import read_tokenizing

        if artifact.manifest.task == IMAGES:
            images(artifact)
            return
        found = read_tokenizing(artifact.path)
        if found.reader == "transformers":
            raise InputError(
                f"its texts are read by transformers ({found.reason}), which infer.py does without.",
                code="unsupported-tokenizer",
            )
        lacks = [name for name in WHOLE if not (artifact.path / f"{name}.onnx").is_file()]
        if artifact.manifest.task in _GENERATES and lacks:
            mend = (
                "Graphs that a recipe starts from get none; start from the folder with weights."
                if artifact.manifest.details.get("foreign")
                else "Export it with `generation_graph: true`."
            )
            raise InputError(
                f"it has no {lacks[0]}.onnx, the graph of a whole generation. {mend}",
                code="missing-graph",
                file=f"{lacks[0]}.onnx",
            )

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Write the artifact, infer.py with its settings, serve.py, requirements.txt and a Dockerfile."""
        from smelt.export.package.standalone.assemble import assemble
        from smelt.export.package.standalone.beside import (
            INSTALL,
            PORT,
            ask,
            dockerfile,
            requirements_file,
        )
        from smelt.export.package.standalone.settings import settings_of

        task = artifact.manifest.task
        settings, notes = settings_of(artifact, origin.generation)
        reader = "pillow" if task == IMAGES else settings["tokenizer"]["reader"]
        copy_artifact(artifact, folder)
        part, kind, use = USES[task if task in USES else "translation"]
        instead = {"tokenizers_reader": "sentencepiece_reader"} if reader == "sentencepiece" else {}
        (folder / INFER).write_text(assemble(part, instead), encoding="utf-8")
        (folder / SERVE).write_text(assemble("serve", {}), encoding="utf-8")
        write_json(folder / SETTINGS, settings)
        (folder / "requirements.txt").write_text(requirements_file(reader), encoding="utf-8")
        (folder / "Dockerfile").write_text(dockerfile(), encoding="utf-8")
        given = "photo.jpg" if task == IMAGES else '"TEXT"'
        return HowTo(
            install=INSTALL,
            run=f"python {INFER} {given}",
            load=(
                ("bash", f"python {INFER} < lines.txt"),
                ("python", f"from infer import {kind}\n\n{use}"),
                ("bash", f"python {SERVE} --port {PORT}\n{ask(task)}"),
                ("bash", f"docker build -t NAME .\ndocker run --rm -p {PORT}:{PORT} NAME"),
            ),
            notes=(*notes, "The Dockerfile was never built: smelt is developed without Docker."),
        )
