"""The format `standalone`: the artifact, with programs that run and serve it without smelt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from smelt.core.artifact import Artifact
from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY, TEXT_TASKS, TEXT_TO_TEXT_TASKS
from smelt.core.errors import InputError
from smelt.core.files import write_json
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.export.package.write_package import copy_artifact

INFER_FILE, SERVE_FILE, INFER_SETTINGS_FILE = "infer.py", "serve.py", "infer.json"
_GENERATES = (*TEXT_TO_TEXT_TASKS, "language-modeling")
# the file in `parts` for a task, its class, and a program that uses the class
TASK_SCRIPTS = {
    "translation": ("translation", "Translator", 'print(Translator()(["TEXT", "ANOTHER"]))'),
    "language-modeling": ("language_modeling", "Writer", 'print(Writer()(["TEXT", "ANOTHER"]))'),
    "text-classification": (
        "text_classification",
        "Classifier",
        'print(Classifier()(["TEXT", ("FIRST OF A PAIR", "SECOND")]))',
    ),
    SENTENCE_SIMILARITY: ("sentence_similarity", "Embedder", 'print(Embedder()(["TEXT", "ANOTHER"]).shape)'),
    IMAGE_CLASSIFICATION: (
        "image_classification",
        "ImageClassifier",
        'print(ImageClassifier()(["photo.jpg"]))',
    ),
}


class StandaloneFormat:
    """A package that needs only onnxruntime, numpy and a tokenizer library or Pillow."""

    name: ClassVar[str] = "standalone"
    summary: ClassVar[str] = "graphs with infer.py and a service: onnxruntime, numpy"
    supported: ClassVar[SupportedArtifacts] = replace(
        TEXT_GRAPHS, tasks=frozenset({*TEXT_TASKS, IMAGE_CLASSIFICATION})
    )
    is_artifact: ClassVar[bool] = True

    def check(self, artifact: Artifact) -> None:
        """Require a tokenizer that works without transformers and a generation graph; or images.

        Raises:
            InputError: it has not.
        """
        from smelt.export.package.standalone.infer_settings import image_settings
        from smelt.runtime.backends.backend import GENERATION_GRAPHS
        from smelt.runtime.text.tokenizer_info import read_tokenizer_info

        if artifact.manifest.task == IMAGE_CLASSIFICATION:
            image_settings(artifact)
            return
        found = read_tokenizer_info(artifact.path)
        if found.reader == "transformers":
            raise InputError(
                f"its tokenizer needs transformers ({found.reason}), which infer.py does not use.",
                code="unsupported-tokenizer",
            )
        lacks = [name for name in GENERATION_GRAPHS if not (artifact.path / f"{name}.onnx").is_file()]
        if artifact.manifest.task in _GENERATES and lacks:
            mend = (
                "Third-party graphs have none; start from the folder with weights."
                if artifact.manifest.details.get("foreign")
                else "Export it with `generation_graph: true`."
            )
            raise InputError(
                f"it has no {lacks[0]}.onnx, the generation graph. {mend}",
                code="missing-graph",
                file=f"{lacks[0]}.onnx",
            )

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write the artifact, infer.py with its settings, serve.py, requirements.txt and a Dockerfile."""
        from smelt.export.package.standalone.assemble import assemble_script
        from smelt.export.package.standalone.deployment_files import (
            INSTALL_COMMAND,
            PORT,
            curl_command,
            dockerfile,
            requirements_file,
        )
        from smelt.export.package.standalone.infer_settings import infer_settings

        task = artifact.manifest.task
        settings, notes = infer_settings(artifact, origin.generation)
        reader = "pillow" if task == IMAGE_CLASSIFICATION else settings["tokenizer"]["reader"]
        copy_artifact(artifact, folder)
        part, kind, use = TASK_SCRIPTS[task if task in TASK_SCRIPTS else "translation"]
        instead = {"tokenizers_reader": "sentencepiece_reader"} if reader == "sentencepiece" else {}
        (folder / INFER_FILE).write_text(assemble_script(part, instead), encoding="utf-8")
        (folder / SERVE_FILE).write_text(assemble_script("serve", {}), encoding="utf-8")
        write_json(folder / INFER_SETTINGS_FILE, settings)
        (folder / "requirements.txt").write_text(requirements_file(reader), encoding="utf-8")
        (folder / "Dockerfile").write_text(dockerfile(), encoding="utf-8")
        given = "photo.jpg" if task == IMAGE_CLASSIFICATION else '"TEXT"'
        return UsageNotes(
            install=INSTALL_COMMAND,
            run=f"python {INFER_FILE} {given}",
            examples=(
                ("bash", f"python {INFER_FILE} < lines.txt"),
                ("python", f"from infer import {kind}\n\n{use}"),
                ("bash", f"python {SERVE_FILE} --port {PORT}\n{curl_command(task)}"),
                ("bash", f"docker build -t NAME .\ndocker run --rm -p {PORT}:{PORT} NAME"),
            ),
            notes=(*notes, "The Dockerfile has not been tested: smelt is developed without Docker."),
        )
