"""Run a PyTorch module of arrays on the first samples of a recipe, to know its inputs and outputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import resolve_path
from smelt.core.user_code import user_code_errors
from smelt.data.npz_arrays import ArrayHeader, read_npz_headers, read_samples
from smelt.models.user_module import TrialRun, named_outputs, run_once
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.runtimes.onnx_import.signature import GraphSignature, TensorSpec
from smelt.tasks.samples import CACHE_INDEX_KEY, TOKEN_MASK_KEY

_SAMPLES = 2
# Names that batches use for other values.
_RESERVED_NAMES = ("labels", CACHE_INDEX_KEY, TOKEN_MASK_KEY)
# What modules compute with; numpy creates float64 by default.
_MODULE_DTYPES = {"float16": "float32", "float64": "float32"}
_DTYPES = ("float32", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class ArraysTrial:
    """A run of a module of arrays, and the signature of its inputs and outputs."""

    run: TrialRun
    signature: GraphSignature


def try_arrays(network: nn.Module, recipe: ParsedRecipe) -> ArraysTrial:
    """Run the module once, on the first two samples of the recipe.

    The inputs are the parameters of its forward: those without a default, and others that the samples have.

    Raises:
        InputError: the samples lack an input, or the module fails or does not return arrays of floats with a
            part for each sample.
    """
    name, origin = next(iter(recipe.data.split_files().items()))
    path = resolve_path(recipe.base, origin)
    if not path.is_file():
        raise InputError(
            f"{path}: expected an .npz file with an array for each input of the module, samples on axis 0.",
            code="missing-file",
        )
    headers = read_npz_headers(path, name)
    inputs = _input_names(network, headers, path)
    samples = read_samples(path, name, dict.fromkeys(inputs, 0)).padded_to(_SAMPLES)
    dtypes = {each: _module_dtype(each, str(samples.values[each].dtype)) for each in inputs}
    tensors = {
        each: torch.from_numpy(samples.values[each][:_SAMPLES].astype(dtypes[each])) for each in inputs
    }
    shapes = ", ".join(f"{each} {list(value.shape)}" for each, value in tensors.items())
    with redirect_stdout(sys.stderr), user_code_errors(f"the module fails on {shapes}"):
        run = run_once(network, **tensors)
    outputs = named_outputs(run.output)
    _require_arrays(outputs, inputs)
    return ArraysTrial(
        run,
        GraphSignature(
            inputs=tuple(_spec(each, dtypes[each], value) for each, value in tensors.items()),
            outputs=tuple(_spec(each, "float32", value) for each, value in outputs.items()),
        ),
    )


def _spec(name: str, dtype: str, value: Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", *value.shape[1:]))


def _input_names(network: nn.Module, headers: Mapping[str, ArrayHeader], path: Path) -> list[str]:
    """Return the inputs of a module.

    Raises:
        InputError: its forward has no named parameters, a reserved name, or one that the samples lack.
    """
    names = []
    for parameter in inspect.signature(network.forward).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        if parameter.default is parameter.empty or parameter.name in headers:
            names.append(parameter.name)
    if not names:
        raise InputError(
            "the module's forward has no named parameters; arrays are passed to it by name.", code="no-inputs"
        )
    for name in names:
        if name in _RESERVED_NAMES:
            raise InputError(
                f"the module's forward has a parameter '{name}', a name that smelt uses. Rename it.",
                code="reserved-name",
            )
        if name not in headers:
            raise InputError(
                f"{path}: no array '{name}', which the module's forward needs; the arrays are"
                f" {', '.join(headers)}.{did_you_mean(name, headers)}",
                code="does-not-fit-graph",
            )
    return names


def _module_dtype(name: str, dtype: str) -> str:
    """Return the type of an input.

    Raises:
        InputError: it is none of torch's.
    """
    dtype = _MODULE_DTYPES.get(dtype, dtype)
    if dtype not in _DTYPES:
        raise InputError(
            f"the array '{name}' is {dtype}; a module takes {', '.join(_DTYPES)}.", code="does-not-fit-graph"
        )
    return dtype


def _require_arrays(outputs: Mapping[str, Any], inputs: list[str]) -> None:
    """Require outputs of floats with a part for each sample, under names that inputs do not have.

    Raises:
        InputError: `wrong-output`.
    """
    problem = None if outputs else "the module returned no outputs."
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            problem = f"the output '{name}' is {type(value).__name__}, not a tensor."
        elif not value.is_floating_point() or not value.dim() or len(value) != _SAMPLES:
            kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            problem = f"the output '{name}' is {kind} for {_SAMPLES} samples."
        elif name in inputs or not str(name).isidentifier():
            problem = f"the output '{name}' needs another name: an identifier that no input has."
    if problem:
        raise InputError(
            f"{problem} Return a tensor, a tuple or a dictionary of tensors of floats, [samples, ...].",
            code="wrong-output",
        )
