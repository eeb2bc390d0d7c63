"""A model of LiteRT (TensorFlow Lite), `model.tflite`, for phones and embedded devices, by litert-torch.

Source: https://github.com/google-ai-edge/litert-torch
"""

from __future__ import annotations

import contextlib
import io
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, MissingDependencyError
from smelt.export.package.package_format import PackageOrigin, UsageNotes
from smelt.export.package.torch_program import (
    EXAMPLE_FILE,
    TorchProgram,
    TorchProgramFormat,
    read_program,
    write_preprocessing,
)

TFLITE_FILE = "model.tflite"
LENGTHS = (32, 128, 512)
"""Tokens of the signatures for texts: litert-torch converts attention with fixed sizes only."""
_EXAMPLE_LENGTH = 128


class LitertFormat(TorchProgramFormat):
    """A `.tflite` file that LiteRT runs: C++, Android, iOS, Python; a signature for each length of texts."""

    name: ClassVar[str] = "litert"
    summary: ClassVar[str] = "one model of LiteRT (.tflite) for mobile devices"

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write `model.tflite` and compare each signature with the model, in LiteRT.

        Raises:
            InputError: litert-torch cannot convert the model.
            MissingDependencyError: litert-torch is not installed.
            RunError: the file computes something else.
        """
        try:
            from ai_edge_litert.interpreter import Interpreter

            with contextlib.redirect_stderr(io.StringIO()):  # notes of its libraries about each other
                import litert_torch
        except ImportError as error:
            raise MissingDependencyError(
                f"the format litert needs the package litert-torch ({error}). Run: pip install"
                " 'smelt[litert]' in an environment of its own",
                code="not-installed",
            ) from error
        program = read_program(artifact)
        signatures = _signatures(program)
        _convert(litert_torch, program, signatures, folder / TFLITE_FILE)
        interpreter = Interpreter(str(folder / TFLITE_FILE))
        for signature, length in signatures.items():
            runner = interpreter.get_signature_runner(signature)
            program.require_equal(_as_function(runner, program), TFLITE_FILE, iter([(1, length)]))
        lengths = [length for length in signatures.values() if length <= _EXAMPLE_LENGTH]
        length = max(lengths, default=min(signatures.values()))
        parts = write_preprocessing(artifact, folder, program.input_names, "np", length)
        signature = next(name for name, size in signatures.items() if size == length)
        dtype = "float32" if program.limit is None else "int32"
        example = (
            f"from ai_edge_litert.interpreter import Interpreter\n{parts.inputs}\n"
            f'run = Interpreter("{TFLITE_FILE}").get_signature_runner("{signature}")\n'
            f'arrays = {{name: array.astype("{dtype}") for name, array in inputs.items()}}\n'
            'output = run(**arrays)["output_0"]\n'
            f"{parts.answer}"
        )
        (folder / EXAMPLE_FILE).write_text(f"{example}\n", encoding="utf-8")
        sample = "text, padded to the signature's number of tokens" if program.limit else "image"
        return UsageNotes(
            install=f"pip install ai-edge-litert=={version('ai-edge-litert')}{parts.packages}",
            run=f"python {EXAMPLE_FILE}",
            examples=(("python", example),),
            notes=(
                *parts.notes,
                f"Signatures: {', '.join(signatures)}. Inputs, by name: {', '.join(program.input_names)}"
                f" ({dtype}); output_0 is the output. One {sample}, per call.",
                "All signatures share the weights.",
            ),
        )


def _signatures(program: TorchProgram) -> dict[str, int]:
    """Return the tokens of each signature; for images one signature, with a length that is not used."""
    if program.limit is None:
        return {"image": 1}
    lengths = [length for length in LENGTHS if length < program.limit] + [min(program.limit, LENGTHS[-1])]
    return {f"tokens_{length}": length for length in lengths}


def _as_function(runner: Any, program: TorchProgram) -> Any:
    """Return a function of tensors, by position, that runs a signature."""
    import torch

    def run(*tensors: Any) -> Any:
        arrays = [(t if t.is_floating_point() else t.int()).numpy() for t in tensors]
        return torch.from_numpy(runner(**dict(zip(program.input_names, arrays, strict=True)))["output_0"])

    return run


def _convert(converter: Any, program: TorchProgram, signatures: dict[str, int], path: Path) -> None:
    """Write the model with a signature for each length.

    Args:
        converter: the module litert_torch.
        program: to convert.
        signatures: the tokens of each.
        path: of the file.

    Raises:
        InputError: `unsupported-structure`, litert-torch cannot convert it.
    """
    builder = converter
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),  # it prints each stage
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            for name, length in signatures.items():
                named = dict(zip(program.input_names, program.inputs(1, length), strict=True))
                builder = builder.signature(name, program.module, sample_kwargs=named)
            builder.convert().export(str(path))
    except Exception as error:  # of several stages, without a common base
        kind = type(program.module.model).__name__
        raise InputError(
            f"litert-torch cannot convert {kind}: {' '.join(str(error).split())[:300]}. Package it as"
            " torch-export, or an export to ONNX.",
            code="unsupported-structure",
        ) from error
