"""The formats `gptq` and `awq`: 4-bit weights in the layouts of AutoGPTQ and AutoAWQ.

The layouts are those that a recipe's model may have (`smelt/models/int4_packing.py`). Both are names of
methods too; how the weights were quantized does not matter here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.export.package.quantized_folder import (
    QuantizedFolderFormat,
    float_linear_layers,
    quantized_layer_edits,
)
from smelt.models.edits import quantize_edit_options
from smelt.models.quantization_config import CHECKPOINT_BITS
from smelt.quantization.groupwise import GROUP_SIZE, group_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from smelt.models.int4_packing import UnpackedInt4
    from smelt.quantization.layers import QuantizedMatrix

_PACKED_MULTIPLE = 8  # integers in an int32
_MIDDLE = 8


class _Int4FolderFormat(QuantizedFolderFormat):
    """What both layouts have in common: all layers have 4 bits and the same groups."""

    description: ClassVar[str] = "4-bit integers in groups"
    float_dtypes: ClassVar[Mapping[str, str]] = {"float32": "float16"}

    def has_form(self, args: Mapping[str, Any]) -> bool:
        """Return whether they are 4-bit integers in groups."""
        weights = args["weights"]
        return (weights["num_bits"], weights["type"], weights["strategy"]) == (
            CHECKPOINT_BITS,
            "int",
            "group",
        )

    def check(self, artifact: Artifact) -> None:
        """Require the same groups in all layers.

        Raises:
            InputError: `mixed-group-sizes`, or those of all formats.
        """
        super().check(artifact)
        sizes = {group_size(quantize_edit_options(edit)) for edit in quantized_layer_edits(artifact.path)}
        if len(sizes) > 1:
            raise InputError(
                f"its layers have different group sizes ({', '.join(map(str, sorted(sizes)))}); config.json"
                f" of this format holds one. Quantize all layers with the same {GROUP_SIZE.name}, or package"
                " it as compressed-tensors.",
                code="mixed-group-sizes",
            )

    def unpacked(self, name: str, matrix: QuantizedMatrix) -> UnpackedInt4:
        """Return the integers, zero points and scales of a layer.

        Raises:
            InputError: its size cannot be packed.
        """
        import torch

        from smelt.models.int4_packing import UnpackedInt4

        codes, grid = matrix.unpack()
        if len(codes) % _PACKED_MULTIPLE or matrix.width % _PACKED_MULTIPLE:
            raise InputError(
                f"its layer '{name}' has {len(codes)} outputs and {matrix.width} inputs; this format packs"
                f" {_PACKED_MULTIPLE} of them. Prune to multiples of {_PACKED_MULTIPLE}, or package it as"
                " compressed-tensors.",
                code="unsupported-layer-size",
            )
        middle = torch.full(grid["scales"].shape, _MIDDLE, dtype=torch.int16)
        return UnpackedInt4(codes.flatten(1), grid.get("zeros", middle).to(torch.int16), grid["scales"])


def _shared_config(matrices: Mapping[str, QuantizedMatrix]) -> dict[str, Any]:
    """Return the keys that both configs have."""
    return {"bits": CHECKPOINT_BITS, "group_size": group_size(next(iter(matrices.values())).options)}


class GptqFormat(_Int4FolderFormat):
    """The layout of AutoGPTQ and GPTQModel."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = "a 4-bit language model in GPTQ's layout, for vLLM"
    requirements: ClassVar[str] = "optimum gptqmodel"

    def check(self, artifact: Artifact) -> None:
        """Require that all linear layers but the output layer are quantized.

        transformers (optimum 2.3) would load floats as quantized.

        Raises:
            InputError: `mixed-quantization`, or those of both layouts.
        """
        from smelt.models.empty_model import empty_model

        super().check(artifact)
        config = read_json_object(artifact.path / "config.json")
        if float_layers := float_linear_layers(empty_model(artifact.path)[0], config):
            raise InputError(
                f"its layers {', '.join(float_layers[:3])} are floats; in this format all linear layers but"
                " the output layer are quantized. Quantize without `exclude`, or package it as awq or"
                " compressed-tensors.",
                code="mixed-quantization",
            )

    def convert(
        self, matrices: Mapping[str, QuantizedMatrix], float_layers: list[str], head: str, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors in the first layout if symmetric, else in the second.

        The first cannot store zero points of 0, and GPTQModel refuses it with zero points if
        another program wrote it.
        """
        from smelt.models.int4_packing import pack_gptq

        unpacked = {name: self.unpacked(name, matrix) for name, matrix in matrices.items()}
        symmetric = all(bool((layer.zeros == _MIDDLE).all()) for layer in unpacked.values())
        checkpoint_format, offset = ("gptq", 1) if symmetric else ("gptq_v2", 0)
        tensors = {
            f"{name}.{suffix}": tensor
            for name, layer in unpacked.items()
            for suffix, tensor in pack_gptq(layer, offset).items()
        }
        return tensors, {
            "quant_method": self.name,
            **_shared_config(matrices),
            "desc_act": False,
            "sym": symmetric,
            "checkpoint_format": checkpoint_format,
            "lm_head": False,
        }


class AwqFormat(_Int4FolderFormat):
    """The layout of AutoAWQ's GEMM kernels."""

    name: ClassVar[str] = "awq"
    summary: ClassVar[str] = "a 4-bit language model in AWQ's layout, for vLLM, SGLang"
    requirements: ClassVar[str] = "gptqmodel"

    def convert(
        self, matrices: Mapping[str, QuantizedMatrix], float_layers: list[str], head: str, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors; they always have zero points."""
        from smelt.models.int4_packing import pack_awq

        tensors = {
            f"{name}.{suffix}": tensor
            for name, matrix in matrices.items()
            for suffix, tensor in pack_awq(self.unpacked(name, matrix)).items()
        }
        return tensors, {
            "quant_method": self.name,
            **_shared_config(matrices),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [*float_layers, head],
            # the same for GPTQModel
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in float_layers},
        }
