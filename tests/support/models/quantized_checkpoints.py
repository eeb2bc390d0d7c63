"""Checkpoints of 4-bit codes as GPTQ's and AWQ's tools write them, packed by the loops of their own code.

folder, values = coded.gptq(causal.model(tmp_path / "float", "llama"), tmp_path / "gptq", group=32)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def quantize_groups(weight: Any, group: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Return codes [N, K], zero points [N, G], scales float16 [N, G] of float [N, K], and code 0 is met."""
    import numpy as np

    rows, width = weight.shape
    count = -(-width // group)
    codes = np.zeros((rows, width), np.int64)
    zeros = np.full((rows, count), 8)
    scales = np.zeros((rows, count), np.float16)
    for index in range(count):
        columns = weight[:, index * group : (index + 1) * group]
        low, high = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
        if symmetric:
            scales[:, index] = np.maximum(-low, high) / 7.5
        else:
            scales[:, index] = (high - low) / 15
            zeros[:, index] = np.clip(np.round(-low / scales[:, index].astype(np.float32)), 1, 15)
        steps = np.round(columns / scales[:, index, None].astype(np.float32))
        codes[:, index * group : (index + 1) * group] = np.clip(steps + zeros[:, index, None], 0, 15)
    return codes, zeros, scales


def write_gptq(
    source: Path,
    folder: Path,
    group: int = 32,
    symmetric: bool = True,
    form: str | None = "gptq",
    **options: Any,
) -> tuple[Path, dict[str, Any]]:
    """Write `source` with its blocks' layers in GPTQ's layout; return the folder and the values by layer.

    Args:
        source: a Llama, float.
        folder: to write to.
        group: inputs that share a scale; -1 for a whole row.
        symmetric: whether all zero points are 8.
        form: checkpoint_format; None leaves it out, as the first tools did.
        options: more of quantization_config, and what is to be another.
    """
    import numpy as np

    def packed(codes: Any, zeros: Any, scales: Any, size: int) -> dict[str, Any]:
        # AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py, pack
        inputs, outputs = codes.T.astype(np.uint32), codes.shape[0]
        qweight = np.zeros((len(inputs) // 8, outputs), np.uint32)
        for row in range(len(qweight)):
            for j in range(8):
                qweight[row] |= inputs[row * 8 + j] << np.uint32(4 * j)
        stored = (zeros.T - (form != "gptq_v2")).astype(np.uint32)
        qzeros = np.zeros((len(stored), outputs // 8), np.uint32)
        for column in range(qzeros.shape[1]):
            for j in range(8):
                qzeros[:, column] |= stored[:, column * 8 + j] << np.uint32(4 * j)
        index = (np.arange(codes.shape[1]) // size).astype(np.int32)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T, "g_idx": index}

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": symmetric}
    config |= {} if form is None else {"checkpoint_format": form}
    return _write_checkpoint(source, folder, group, symmetric, config | options, packed)


def write_awq(source: Path, folder: Path, group: int = 32, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Write `source` with its blocks' layers in AWQ's GEMM layout, with zero points; as `gptq`."""
    import numpy as np

    def packed(codes: Any, zeros: Any, scales: Any, size: int) -> dict[str, Any]:
        # AutoAWQ, modules/linear/gemm.py, from_linear
        def columns(values: Any) -> Any:
            packed_columns = np.zeros((len(values), values.shape[1] // 8), np.uint32)
            for column in range(packed_columns.shape[1]):
                for i in range(8):
                    packed_columns[:, column] |= values[:, column * 8 + AWQ_ORDER[i]] << np.uint32(i * 4)
            return packed_columns

        qweight, qzeros = columns(codes.T.astype(np.uint32)), columns(zeros.T.astype(np.uint32))
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return _write_checkpoint(source, folder, group, False, config | options, packed)


def _write_checkpoint(
    source: Path, folder: Path, group: int, symmetric: bool, config: dict[str, Any], packed: Any
) -> tuple[Path, dict[str, Any]]:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, folder)
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".layers." not in name or tensor.ndim != 2:
            tensors[name] = tensor.astype(np.float16)
            continue
        layer = name.removesuffix(".weight")
        size = tensor.shape[1] if group == -1 else group
        codes, zeros, scales = quantize_groups(tensor.astype(np.float32), size, symmetric)
        group_index = np.arange(tensor.shape[1]) // size
        values[layer] = (codes - zeros[:, group_index]) * scales[:, group_index].astype(np.float32)
        packed_tensors = packed(codes, zeros, scales, size)
        for name_suffix, array in packed_tensors.items():
            as_stored = array.view(np.int32) if array.dtype == np.uint32 else array
            tensors[f"{layer}.{name_suffix}"] = np.ascontiguousarray(as_stored)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return folder, values


def load_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors in `folder`."""
    from safetensors.numpy import load_file

    return dict(load_file(folder / "model.safetensors"))


def save_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Put `tensors` in the place of those in `folder`."""
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
