"""A program of ExecuTorch, `model.pte`, for phones and embedded devices, with XNNPACK's operators for CPUs.

Source: https://docs.pytorch.org/executorch/stable/using-executorch-export.html
"""

from __future__ import annotations

import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, MissingDependencyError
from smelt.export.package.package_format import PackageOrigin, UsageNotes
from smelt.export.package.torch_program import (
    EXAMPLE_FILE,
    TorchProgramFormat,
    read_program,
    write_preprocessing,
)

PROGRAM_FILE = "model.pte"
# memory is planned for the longest text, and attention needs its square
MAX_LENGTH = 512


class ExecutorchFormat(TorchProgramFormat):
    """A `.pte` file that the runtime of ExecuTorch runs: C++, Android, iOS, Python."""

    name: ClassVar[str] = "executorch"
    summary: ClassVar[str] = "one program of ExecuTorch (.pte) for mobile CPUs"

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write `model.pte` and compare it with the model, in ExecuTorch's runtime.

        Raises:
            InputError: ExecuTorch has no kernel for an operator of the model.
            MissingDependencyError: ExecuTorch is not installed.
            RunError: the program computes something else.
        """
        try:
            from executorch.runtime import Runtime
        except ImportError as error:
            raise MissingDependencyError(
                f"the format executorch needs the package executorch ({error}). Run: pip install"
                " 'smelt[executorch]'",
                code="not-installed",
            ) from error
        program = read_program(artifact)
        limit = None if program.limit is None else min(program.limit, MAX_LENGTH)
        (folder / PROGRAM_FILE).write_bytes(_lower(program.export(fixed_batch=True, limit=limit)))
        method = Runtime.get().load_program(folder / PROGRAM_FILE).load_method("forward")
        lengths = (2, limit) if limit else (1,)
        program.require_equal(
            lambda *tensors: method.execute(list(tensors))[0], PROGRAM_FILE, iter((1, n) for n in lengths)
        )
        parts = write_preprocessing(artifact, folder, program.input_names)
        example = (
            f"from executorch.runtime import Runtime\n{parts.inputs}\n"
            f'method = Runtime.get().load_program("{PROGRAM_FILE}").load_method("forward")\n'
            f"names = {json.dumps(program.input_names)}\n"
            "output = method.execute([inputs[name] for name in names])[0].numpy()\n"
            f"{parts.answer}"
        )
        (folder / EXAMPLE_FILE).write_text(f"{example}\n", encoding="utf-8")
        size = f" of 2 to {limit} tokens" if limit else ""
        return UsageNotes(
            install=f"pip install executorch=={version('executorch')}{parts.packages}",
            run=f"python {EXAMPLE_FILE}",
            examples=(("python", example),),
            notes=(
                *parts.notes,
                f"`forward` takes {', '.join(program.input_names)} in this order: one sample{size} per call.",
                "It was lowered to XNNPACK; a runtime without that backend refuses it.",
            ),
        )


def _lower(exported: Any) -> bytes:
    """Return the program of ExecuTorch for a torch.export.ExportedProgram.

    Raises:
        InputError: `unsupported-structure`, an operator has no kernel.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
            return bytes(lowered.to_executorch().buffer)
    except Exception as error:  # of several stages, without a common base
        raise InputError(
            f"ExecuTorch cannot lower this model: {' '.join(str(error).split())[:300]}. Package it as"
            " torch-export, or an export to ONNX.",
            code="unsupported-structure",
        ) from error
