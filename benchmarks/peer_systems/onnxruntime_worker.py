"""ONNX Runtime on a plain export of torch, and what its own quantizers make of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from peer_systems.worker import Case, Job, Opened, Rows, main

NAME = "model.onnx"


def make(job: Job) -> None:
    """Export, or quantize the export of the system that this one begins with."""
    files = Path(job["files"])
    files.mkdir(parents=True, exist_ok=True)
    if job["variant"] == "fp32":
        _export(job, files / NAME)
        return
    prepared = files / "prepared.onnx"
    _prepare(Path(job["from"]) / NAME, prepared)
    if job["variant"] == "dynamic":
        _dynamic(prepared, files / NAME)
    else:
        _static(prepared, files / NAME, job["calibration"])
    prepared.unlink()


def _export(job: Job, out: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(job["model"]).eval()
    ids = torch.tensor([job["calibration"][0]] * 2)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        model,
        (),
        out,
        kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        dynamo=True,
        external_data=False,
    )


def _prepare(source: Path, out: Path) -> None:
    """Remove the shapes that the exporter wrote down: the quantizers stumble over them."""
    import onnx

    model = onnx.load(source)
    del model.graph.value_info[:]
    onnx.save(model, out)


_HINTS = {"DefaultTensorType": 1, "MatMulConstBOnly": True}


def _dynamic(source: Path, out: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, out, per_channel=True, weight_type=QuantType.QInt8, extra_options=_HINTS)


def _static(source: Path, out: Path, rows: list[list[int]]) -> None:
    """Explicit Q/DQ: uint8 activations by min-max, int8 weights per channel."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows = iter(rows)

        def get_next(self) -> dict[str, Any] | None:
            row = next(self.rows, None)
            if row is None:
                return None
            inputs = feeds([row])
            del inputs["token_type_ids"]  # the plain export takes none
            return inputs

    quantize_static(
        source,
        out,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm"],
        extra_options=_HINTS,
    )


def feeds(rows: Rows) -> dict[str, Any]:
    """Return what the graph takes: int64 [B, L] each."""
    ids = np.array(rows, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def serve(job: Job) -> Opened:
    """Open the graph that was made."""
    return serve_graph(Path(job["files"]) / NAME, job["threads"])


def serve_graph(path: Path, threads: int) -> Opened:
    """Open a graph; it is fed those of the usual inputs that it takes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    types = {one.name: np.int32 if "int32" in one.type else np.int64 for one in session.get_inputs()}

    def run(rows: Rows, case: Case) -> Rows:
        inputs = feeds(rows)
        return list(
            session.run(None, {name: inputs[name].astype(kind) for name, kind in types.items()})[0].tolist()
        )

    return run, f"ONNX Runtime {onnxruntime.__version__}"


if __name__ == "__main__":
    main(make, serve)
