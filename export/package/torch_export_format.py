"""A program of torch.export, `model.pt2`, that torch loads without the model's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from smelt.core.artifact import Artifact
from smelt.export.package.package_format import PackageOrigin, UsageNotes
from smelt.export.package.torch_program import (
    EXAMPLE_FILE,
    TorchProgramFormat,
    read_program,
    write_preprocessing,
)

PROGRAM_FILE = "model.pt2"


class TorchExportFormat(TorchProgramFormat):
    """`torch.export.load("model.pt2")`: graph and weights, for torch, AOTInductor and other compilers."""

    name: ClassVar[str] = "torch-export"
    summary: ClassVar[str] = "one program of torch.export (.pt2)"

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write `model.pt2` and compare it with the model.

        Raises:
            InputError: torch.export cannot capture the model.
            RunError: the loaded program computes something else.
        """
        import torch

        program = read_program(artifact)
        exported = program.export()
        torch.export.save(exported, folder / PROGRAM_FILE)
        loaded = torch.export.load(folder / PROGRAM_FILE).module()
        longest = min(program.limit or 2, 40)
        program.require_equal(
            lambda *tensors: loaded(**dict(zip(program.input_names, tensors, strict=True))),
            PROGRAM_FILE,
            iter([(1, 5), (3, longest)]),
        )
        parts = write_preprocessing(artifact, folder, program.input_names)
        example = (
            f"import torch\n{parts.inputs}\n"
            f'model = torch.export.load("{PROGRAM_FILE}").module()\n'
            f"names = {json.dumps(program.input_names)}\n"
            "output = model(**{name: inputs[name] for name in names}).numpy()\n"
            f"{parts.answer}"
        )
        (folder / EXAMPLE_FILE).write_text(f"{example}\n", encoding="utf-8")
        return UsageNotes(
            install=f"pip install torch=={torch.__version__.partition('+')[0]}{parts.packages}",
            run=f"python {EXAMPLE_FILE}",
            examples=(("python", example),),
            notes=(
                *parts.notes,
                f"Inputs, by name: {', '.join(program.input_names)}. The batch size and the length of"
                " texts are any.",
                "torch promises no compatibility of such files between versions; load it with the version"
                " above.",
            ),
        )
