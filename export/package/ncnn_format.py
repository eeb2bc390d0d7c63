"""A network of ncnn, `model.ncnn.param` and `model.ncnn.bin`, for phones and boards; pnnx converts it.

A text is one call, without padding, so the network has no attention mask: ncnn has no operators for it.

Source: https://github.com/pnnx/pnnx
"""

from __future__ import annotations

import copy
import json
import subprocess
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
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

PARAM_FILE = "model.ncnn.param"
BIN_FILE = "model.ncnn.bin"
# two, so that pnnx sees which sizes depend on the length
_TRACED_LENGTHS = (16, 9)
_LONGEST_COMPARED = 512


class NcnnFormat(TorchProgramFormat):
    """`.param` and `.bin` files that the runtime of ncnn runs: C++, Android, iOS, Python."""

    name: ClassVar[str] = "ncnn"
    summary: ClassVar[str] = "ncnn network (.param, .bin) for mobile and embedded CPUs"

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write the network and compare it with the model, in ncnn.

        Raises:
            InputError: ncnn has no layer for an operator of the model.
            MissingDependencyError: ncnn or pnnx is not installed.
            RunError: the network computes something else.
        """
        try:
            import ncnn
            import pnnx
        except ImportError as error:
            raise MissingDependencyError(
                f"the format ncnn needs the packages ncnn and pnnx ({error}). Run: pip install 'smelt[ncnn]'",
                code="not-installed",
            ) from error
        program = _of_unpadded_text(read_program(artifact))
        _convert(program, pnnx.EXEC_PATH, folder)
        network = ncnn.Net()
        # ncnn computes in float16 where the processor can; the comparison is of float32
        network.opt.use_fp16_packed = network.opt.use_fp16_storage = network.opt.use_fp16_arithmetic = False
        if network.load_param(str(folder / PARAM_FILE)) or network.load_model(str(folder / BIN_FILE)):
            raise _refusal(program, "ncnn cannot load what pnnx wrote")
        lengths = (2, min(program.limit, _LONGEST_COMPARED)) if program.limit else (1,)
        program.require_equal(
            lambda *tensors: _run(network, program, tensors), PARAM_FILE, iter((1, n) for n in lengths)
        )
        parts = write_preprocessing(artifact, folder, program.input_names, "np")
        dtype = "float32" if program.limit is None else "int32"
        example = (
            f"import ncnn\n{parts.inputs}\n"
            "network = ncnn.Net()\n"
            "options = network.opt\n"
            "options.use_fp16_packed = options.use_fp16_storage = options.use_fp16_arithmetic = False\n"
            f'network.load_param("{PARAM_FILE}")\n'
            f'network.load_model("{BIN_FILE}")\n'
            "extractor = network.create_extractor()\n"
            f"for position, name in enumerate({json.dumps(program.input_names)}):\n"
            f'    array = inputs[name][0].astype("{dtype}")  # named: Mat points to its memory until clone\n'
            '    extractor.input(f"in{position}", ncnn.Mat(array).clone())\n'
            'output = extractor.extract("out0")[1].numpy()\n'
            f"{parts.answer}"
        )
        (folder / EXAMPLE_FILE).write_text(f"{example}\n", encoding="utf-8")
        blobs = ", ".join(f"in{n} is {name}" for n, name in enumerate(program.input_names))
        sample = f"text of 2 to {program.limit} tokens, without padding," if program.limit else "image"
        return UsageNotes(
            install=f"pip install ncnn=={version('ncnn')}{parts.packages}",
            run=f"python {EXAMPLE_FILE}",
            examples=(("python", example),),
            notes=(
                *parts.notes,
                f"Blobs: {blobs} ({dtype}), out0 is the output. One {sample} per call, without a batch axis.",
                "Weights are float32. On processors with float16, ncnn computes in it unless the three"
                " options are off.",
            ),
        )


def _of_unpadded_text(program: TorchProgram) -> TorchProgram:
    """Return the program without attention_mask, and without modules or parameters in two places.

    pnnx loses the weights of the second place, so each gets its own; `program.module` is changed.

    An embedder gets token_type_ids where its family has them: ncnn has no layer for how it makes its own.
    """
    from torch import nn

    from smelt.models.tokenizer import uses_token_types

    seen: set[int] = set()
    for path, module in list(program.module.named_modules(remove_duplicate=False)):
        if id(module) in seen:
            program.module.set_submodule(path, copy.deepcopy(module))
        seen.add(id(module))
    for module in program.module.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=False))
            seen.add(id(parameter))
    if program.limit is None:
        return program
    has_types = uses_token_types(program.module.model.config.to_dict())
    return replace(program, input_names=("input_ids", "token_type_ids") if has_types else ("input_ids",))


def _convert(program: TorchProgram, executable: str, folder: Path) -> None:
    """Write PARAM_FILE and BIN_FILE into `folder` with pnnx.

    Raises:
        InputError: `unsupported-structure`, pnnx cannot read the model, or an operator has no layer in ncnn.
    """
    import torch

    lengths = [min(length, program.limit or length) for length in _TRACED_LENGTHS]
    first, second = (program.inputs(1, length) for length in lengths)
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                named = dict(zip(program.input_names, first, strict=True))
                traced = torch.jit.trace(program.module, example_kwarg_inputs=named, check_trace=False)
                traced.save(str(work / "model.pt"))
        except Exception as error:  # whatever the model's code raises
            raise _refusal(program, f"torch.jit.trace: {' '.join(str(error).split())[:300]}") from error
        command = [executable, "model.pt", f"inputshape={_shapes(first)}", "fp16=0"]
        command += [f"inputshape2={_shapes(second)}"] if program.limit else []
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode or not (work / PARAM_FILE).is_file():
            raise _refusal(program, f"pnnx: {' '.join(done.stderr.split())[-300:]}")
        text = (work / PARAM_FILE).read_text(encoding="utf-8")
        # operators that pnnx keeps have its own names, such as Tensor.to; layers of ncnn have no dot
        kinds = {line.split()[0] for line in text.splitlines()[2:] if line.strip()}
        unknown = sorted(kind for kind in kinds if "." in kind or ":" in kind)
        if unknown:
            raise _refusal(program, f"ncnn has no layer for {', '.join(unknown)}")
        for name in (PARAM_FILE, BIN_FILE):
            (folder / name).write_bytes((work / name).read_bytes())


def _shapes(tensors: tuple[Any, ...]) -> str:
    """Return shapes and dtypes as pnnx reads them: `[1,16]i64,[1,16]i64`."""
    return ",".join(
        f"[{','.join(map(str, tensor.shape))}]{'f32' if tensor.is_floating_point() else 'i64'}"
        for tensor in tensors
    )


def _run(network: Any, program: TorchProgram, tensors: tuple[Any, ...]) -> Any:
    """Return the network's output for one sample, with a batch axis.

    Raises:
        InputError: `unsupported-structure`, a layer of ncnn refuses its input.
    """
    import ncnn
    import torch

    extractor = network.create_extractor()
    for position, tensor in enumerate(tensors):
        array = (tensor if tensor.is_floating_point() else tensor.int())[0].numpy()
        extractor.input(f"in{position}", ncnn.Mat(array).clone())
    status, output = extractor.extract("out0")
    if status:
        raise _refusal(program, f"ncnn cannot run it for inputs of {_shapes(tensors)}")
    return torch.from_numpy(output.numpy().copy())[None]


def _refusal(program: TorchProgram, reason: str) -> InputError:
    kind = type(program.module.model).__name__
    return InputError(
        f"pnnx cannot convert {kind} to ncnn: {reason}. Package it as torch-export, or an export to ONNX.",
        code="unsupported-structure",
    )
