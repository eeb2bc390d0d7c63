"""The format `compressed-tensors`: the layout of llm-compressor, which vLLM, SGLang and TensorRT-LLM read.

Weights in groups are packed into int32 (`pack-quantized`); int8 weights per row are stored as they are, for
kernels that quantize activations too (`int-quantized`, `float-quantized`), and 4-bit floats with the scales
of their formats (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`).

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.errors import RunError
from smelt.core.system import require_package
from smelt.export.package.quantized_folder import QuantizedFolderFormat
from smelt.models.edits import Edit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from smelt.quantization.layers import QuantizedMatrix

_PACKAGE, _OLDEST = "compressed-tensors", "0.20"
_ALL_LINEAR = "Linear"


class CompressedTensorsFormat(QuantizedFolderFormat):
    """Weights of any bits in groups, with or without zero points, int8 and fp8 rows, and 4-bit floats."""

    name: ClassVar[str] = "compressed-tensors"
    summary: ClassVar[str] = "a quantized language model for vLLM, SGLang, TensorRT-LLM"
    description: ClassVar[str] = (
        "integers times a scale of a group, symmetric int8 or fp8 weights per row, or 4-bit floats in blocks"
    )
    requirements: ClassVar[str] = _PACKAGE

    def has_form(self, args: Mapping[str, Any]) -> bool:
        """Return True: the args are the library's own."""
        return True

    def example_config(self, edits: list[Edit]) -> tuple[str, str]:
        """Return the config that loads floats, where there are zero points of weights.

        transformers 5.23 expects packed weights with zero points that are not packed.
        """
        has_zeros = any(edit.get("symmetric") is False for edit in edits)
        return ("CompressedTensorsConfig", "dequantize=True") if has_zeros else ("", "")

    def convert(
        self, matrices: Mapping[str, QuantizedMatrix], float_layers: list[str], head: str, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors that the library's compressors make, and its config.

        Raises:
            MissingDependencyError: the library is not installed.
            RunError: its tensors stand for other values.
        """
        require_package(_PACKAGE, _OLDEST, f"the format {self.name}")
        scales = _checkpoint_scales(matrices)
        tensors = {
            f"{name}.{suffix}": tensor
            for name, matrix in matrices.items()
            for suffix, tensor in _compress(name, matrix, scales[name], dtype).items()
        }
        return tensors, _quantization_config(matrices, [*float_layers, head])


def _checkpoint_scales(matrices: Mapping[str, QuantizedMatrix]) -> dict[str, dict[str, Tensor]]:
    """Return the scales of each layer; those of one module (an attention, a feed-forward part) together."""
    parts: dict[tuple[str, str], list[str]] = {}
    for name, matrix in matrices.items():
        parts.setdefault((name.rpartition(".")[0], matrix.scheme.name), []).append(name)
    return {
        name: scales
        for names in parts.values()
        for name, scales in zip(
            names,
            matrices[names[0]].scheme.checkpoint_tensors([matrices[name] for name in names]),
            strict=True,
        )
    }


def _compress(
    name: str, matrix: QuantizedMatrix, scales: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of the layer `name` by the ends of their names; float32 scales get the `dtype`.

    Raises:
        RunError: they stand for other values.
    """
    import torch
    from compressed_tensors.compressors import BaseCompressor

    scheme = _scheme(matrix, [name])
    weight, block_scales = matrix.dequantize(), scales["weight_scale"]
    # any scale stands for a group of zeros; the library divides by it
    tensors = {"weight": weight, **scales, "weight_scale": block_scales.where(block_scales != 0, 1.0)}
    if not scheme.weights.symmetric:
        middle = 2 ** (scheme.weights.num_bits - 1)
        zeros = matrix.unpack().qparams["zeros"]
        tensors["weight_zero_point"] = (zeros.to(torch.int16) - middle).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    compressed: dict[str, Tensor] = compressor.compress(tensors, scheme)
    if not torch.equal(compressor.decompress(compressed, scheme)["weight"], weight):
        raise RunError(
            f"{name}: {_PACKAGE} changed the quantized weights. Report this with its version.",
            code="parity-failed",
        )
    if compressed["weight_scale"].dtype == torch.float32:  # else the format defines its type
        compressed["weight_scale"] = compressed["weight_scale"].to(dtype)
    return {suffix: tensor.contiguous() for suffix, tensor in compressed.items()}


def _quantization_config(matrices: Mapping[str, QuantizedMatrix], float_layers: list[str]) -> dict[str, Any]:
    """Return `quantization_config`: groups of layers with weights of the same form."""
    import compressed_tensors
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    groups: list[tuple[Mapping[str, Any] | None, list[str]]] = []
    for name, matrix in matrices.items():
        args = matrix.scheme.checkpoint_args(matrix.options)
        names = next((names for other, names in groups if other == args), None)
        if names is None:
            groups.append((args, names := []))
        names.append(name)
    schemes = {
        f"group_{number}": _scheme(matrices[names[0]], [_ALL_LINEAR] if len(groups) == 1 else names)
        for number, (_, names) in enumerate(groups)
    }
    formats = {scheme.format for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups=schemes,
        format=formats.pop() if len(formats) == 1 else CompressionFormat.mixed_precision,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=float_layers,
    )
    return {**config.model_dump(mode="json"), "version": compressed_tensors.__version__}


def _scheme(matrix: QuantizedMatrix, targets: list[str]) -> Any:
    """Return the library's QuantizationScheme for the weights of `matrix`."""
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(targets=targets, **matrix.scheme.checkpoint_args(matrix.options) or {})
