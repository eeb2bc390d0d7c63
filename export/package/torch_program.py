"""Capture a torch artifact as one program with torch.export: the common part of the formats that hold one.

Supported are models of one pass: classifiers, embedders, taggers, masked language models, images. The program
takes the tensors that the model does, by position and by name, and returns logits or embeddings.

Shapes: B = batch, L = tokens of the longest text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, RunError
from smelt.core.files import read_json_object
from smelt.data.label_thresholds import logit_thresholds
from smelt.data.labels import MULTI_LABEL, REGRESSION, problem_type
from smelt.data.tasks import task_traits, tasks_with
from smelt.export.package.hub_files import (
    copy_tokenizer_files,
    extra_requirements,
    preprocessing_notes,
    with_prefix,
)
from smelt.export.package.package_format import SupportedArtifacts
from smelt.models.edits import read_edits
from smelt.runtimes.images import PIXEL_VALUES, PROCESSOR_FILE, read_processor

EXAMPLE_FILE = "example.py"
"""Runs the program on one text or image; README.md has the same lines."""
TOLERANCE = 1e-3
"""Largest difference of an output, of the standard deviation of all; as parity of fp32."""
_EXAMPLE_LENGTH = 9


@dataclass(frozen=True)
class TorchProgram:
    """A model to capture.

    module: called with tensors by `input_names`. limit: the maximum number of tokens; None for images.
    image_size: height and width, for images.
    """

    module: Any
    input_names: tuple[str, ...]
    vocabulary: int
    limit: int | None
    image_size: tuple[int, int] | None

    def inputs(self, batch: int, length: int) -> tuple[Any, ...]:
        """Return random inputs: int64 [B, L] with padding in the last text, or float32 [B, 3, h, w]."""
        import torch

        generator = torch.Generator().manual_seed(batch * 1000 + length)
        if self.image_size is not None:
            return (torch.randn(batch, 3, *self.image_size, generator=generator),)
        ids = torch.randint(0, self.vocabulary, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, max(1, 2 * length // 3) :] = 0
        tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        return tuple(tensors[name] for name in self.input_names)

    def export(self, fixed_batch: bool = False, limit: int | None = None) -> Any:
        """Return the torch.export.ExportedProgram, of any batch size unless `fixed_batch` (1), and length.

        Raises:
            InputError: `unsupported-structure`, torch.export cannot capture the model.
        """
        import torch

        length_dim = torch.export.Dim("length", min=2, max=limit) if limit else torch.export.Dim.AUTO
        axes: dict[int, Any] = {} if fixed_batch else {0: torch.export.Dim.AUTO}
        axes |= {1: length_dim} if self.image_size is None else {}
        example = self.inputs(1 if fixed_batch else 2, min(_EXAMPLE_LENGTH, limit or _EXAMPLE_LENGTH))
        named = dict(zip(self.input_names, example, strict=True))
        try:
            with torch.no_grad():
                return torch.export.export(
                    self.module, (), named, dynamic_shapes=dict.fromkeys(named, axes), strict=False
                )
        except Exception as error:  # its error classes share no other base
            kind = type(self.module.model).__name__
            raise InputError(
                f"torch.export cannot capture {kind}: {' '.join(str(error).split())[:300]}. Package an export"
                " to ONNX, such as standalone.",
                code="unsupported-structure",
            ) from error

    def require_equal(self, run: Any, name: str, shapes: Iterator[tuple[int, int]]) -> None:
        """Require that `run`, a function of tensors, returns the model's outputs.

        Args:
            run: of the loaded file.
            name: of the file.
            shapes: batch sizes and lengths to compare.

        Raises:
            RunError: `parity-failed`.
        """
        import torch

        for batch, length in shapes:
            inputs = self.inputs(batch, length)
            with torch.no_grad():
                named = dict(zip(self.input_names, inputs, strict=True))
                expected, actual = self.module(**named), run(*inputs)
            difference = float((actual - expected).abs().max() / (expected.std(correction=0) or 1.0))
            if actual.shape != expected.shape or not difference <= TOLERANCE:
                raise RunError(
                    f"{name}: outputs differ from the model's by {difference:.3g} standard deviations, limit"
                    f" {TOLERANCE:g}. Report this with the model's config.json.",
                    code="parity-failed",
                    file=name,
                )


class TorchProgramFormat:
    """What the formats of programs share: which artifacts they take."""

    supported: ClassVar[SupportedArtifacts] = SupportedArtifacts(
        formats=frozenset({"torch"}),
        tasks=frozenset(tasks_with(architecture="encoder")),
        hint="Package the step before the export.",
    )
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require layers that torch computes as they are stored.

        Raises:
            InputError: `unsupported-structure`, names the first quantized layer.
        """
        quantized = [str(e.get("module")) for e in read_edits(artifact.path) if e.get("op") == "quantize"]
        if quantized:
            raise InputError(
                f"{len(quantized)} of its layers are quantized ({quantized[0]}, ...), which torch only"
                " emulates. Package a step before quantize, or an export to ONNX.",
                code="unsupported-structure",
            )


def read_program(artifact: Artifact) -> TorchProgram:
    """Load the model of `artifact` in float32."""
    import torch
    from torch import nn

    from smelt.models.checkpoint import load_model, load_tokenizer
    from smelt.models.sentence_model import head_output
    from smelt.models.text_rules import NO_LIMIT, is_sentence_model, max_input_length
    from smelt.models.tokenizer import uses_token_types

    class SinglePass(nn.Module):
        """Tensors in, one tensor out."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            token_type_ids: torch.Tensor | None = None,
        ) -> torch.Tensor:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            return head_output(
                self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
            ).float()

    class SinglePassImage(nn.Module):
        """Pixels in, logits out."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(pixel_values=pixel_values).logits.float()
            return logits

    model, _ = load_model(artifact.path)
    model.requires_grad_(False)  # a program keeps this, and its outputs would need detach()
    config = model.config.to_dict()
    if task_traits(artifact.manifest.task).modality == "image":
        size = read_processor(artifact.path).shape
        if size is None:
            raise InputError(
                f"its {PROCESSOR_FILE} has no fixed image size. Set size with height and width.",
                code="missing-image-size",
            )
        return TorchProgram(SinglePassImage(model).eval(), (PIXEL_VALUES,), 0, None, size)
    names: tuple[str, ...] = ("input_ids", "attention_mask")
    names += ("token_type_ids",) if uses_token_types(config) and not is_sentence_model(model) else ()
    limit = max_input_length(load_tokenizer(artifact.path), config)
    module = SinglePass(model).eval()
    return TorchProgram(module, names, int(config["vocab_size"]), min(limit, NO_LIMIT), None)


@dataclass(frozen=True)
class ExampleParts:
    """What the examples of all formats share.

    inputs: lines of Python that make `inputs`, a dict of arrays or tensors. answer: lines that print the
    array `output` of one sample, with the names of its classes. packages: of PyPI that both need, each with a
    leading space. notes: for the README.
    """

    inputs: str
    answer: str
    packages: str
    notes: tuple[str, ...]


def write_preprocessing(
    artifact: Artifact,
    folder: Path,
    input_names: tuple[str, ...],
    tensors: str = "pt",
    length: int | None = None,
) -> ExampleParts:
    """Copy config.json and the tokenizer or image processor.

    Args:
        artifact: the torch artifact.
        folder: the package.
        input_names: of the program.
        tensors: `pt` for torch's, `np` for numpy's arrays.
        length: pads and truncates texts to this number of tokens.

    Returns:
        The parts of an example that depend on the model and not on the format.
    """
    import shutil

    source = artifact.path
    shutil.copyfile(source / "config.json", folder / "config.json")
    answer = answer_code(artifact.manifest.task, source)
    if task_traits(artifact.manifest.task).modality == "image":
        shutil.copyfile(source / PROCESSOR_FILE, folder / PROCESSOR_FILE)
        code = (
            "from PIL import Image\nfrom transformers import AutoImageProcessor\n"
            'processor = AutoImageProcessor.from_pretrained(".")\n'
            f'inputs = dict(processor(Image.open("photo.jpg"), return_tensors="{tensors}"))'
        )
        # without torchvision transformers reads images with Pillow, as smelt does, and torch is not installed
        note = f"{EXAMPLE_FILE} reads photo.jpg: put an image of that name into this folder."
        return ExampleParts(code, answer, " transformers pillow", (note,))
    copy_tokenizer_files(source, folder)
    # a tokenizer may list fewer inputs than the program takes
    options = "" if length is None else f', padding="max_length", truncation=True, max_length={length}'
    options += ", return_token_type_ids=True" if "token_type_ids" in input_names else ""
    code = (
        "from transformers import AutoTokenizer\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")\n'
        f'inputs = dict(tokenizer([{with_prefix(source, "A text.")!r}], return_tensors="{tensors}"{options}))'
    )
    packages = f" transformers{extra_requirements(folder)}"
    return ExampleParts(code, answer, packages, preprocessing_notes(source))


def answer_code(task: str, source: Path) -> str:
    """Return lines that print `output`, a numpy array [1, ...] or [...], with the names of its classes.

    Args:
        task: of the model.
        source: folder with its config.json.
    """
    kind = task_traits(task).output
    if kind not in ("labels", "tags"):
        return "print(output)"
    names = 'from transformers import AutoConfig\nclasses = AutoConfig.from_pretrained(".").id2label\n'
    if kind == "tags":
        return (
            f"{names}"
            'tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])\n'
            "for token, index in zip(tokens, output.reshape(len(tokens), -1).argmax(-1)):\n"
            "    if token not in (tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token):\n"
            "        print(token, classes[int(index)])"
        )
    config = read_json_object(source / "config.json")
    problem = problem_type(config)
    if problem == REGRESSION:
        return "print(output)"
    if problem == MULTI_LABEL:
        limits = logit_thresholds(config).tolist()  # of logits
        return (
            f"{names}limits = {limits}\n"
            "print([classes[i] for i, logit in enumerate(output.ravel()) if logit > limits[i]], output)"
        )
    return f"{names}print(classes[int(output.argmax())], output)"
