"""Microsoft Olive for BERT on the CPU: conversion, its graph optimization for transformers, int8.

What its own recipes for BERT on CPUs do; ONNX Runtime runs the result.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from peer_systems.onnxruntime_worker import NAME, serve_graph
from peer_systems.worker import Job, Opened, main


def make(job: Job) -> None:
    """Run Olive's workflow into the folder; what it makes on the way is removed."""
    from olive.workflows import run

    files = Path(job["files"])
    config = _workflow(job)
    run(config)
    (model_path,) = sorted((files / "out").rglob("*.onnx"))
    for path in model_path.parent.iterdir():
        if path.suffix in (".onnx", ".data"):
            shutil.move(path, files / (NAME if path == model_path else path.name))
    for name in ("out", "cache"):
        shutil.rmtree(files / name, ignore_errors=True)


def _workflow(job: Job) -> dict[str, Any]:
    files = Path(job["files"])
    quantize: dict[str, Any] = {"type": "OnnxDynamicQuantization"}
    static = job["variant"] == "static"
    if static:
        _register(job["calibration"])
        quantize = {"type": "OnnxStaticQuantization", "data_config": "rows", "quant_format": "QDQ"}
    names = ["input_ids", "attention_mask", "token_type_ids"]
    rows = {"load_dataset_config": {"type": "rows_of_peers"}, "dataloader_config": {"batch_size": 1}}
    return {
        "input_model": {
            "type": "HfModel",
            "model_path": job["model"],
            "task": "text-classification",
            "io_config": {
                "input_names": names,
                "output_names": ["logits"],
                "input_shapes": [[1, 128]] * 3,
                "input_types": ["int64"] * 3,
                "dynamic_axes": {name: {"0": "batch", "1": "length"} for name in names},
            },
        },
        "data_configs": [{"name": "rows", "type": "DataContainer", **rows}] if static else [],
        "systems": {
            "local": {
                "type": "LocalSystem",
                "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
            }
        },
        "passes": {
            "conversion": {"type": "OnnxConversion", "target_opset": 20},
            "transformer": {"type": "OrtTransformersOptimization", "model_type": "bert"},
            "quantization": quantize,
        },
        "target": "local",
        "output_dir": str(files / "out"),
        "cache_dir": str(files / "cache"),
    }


def _register(rows: list[list[int]]) -> None:
    import torch
    from olive.data.component.dataset import BaseDataset
    from olive.data.registry import Registry

    def rows_of_peers(data_dir: Any = None, **_: Any) -> Any:
        samples = []
        for row in rows:
            ids = torch.tensor(row)
            inputs = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
            samples.append(({"input_ids": ids, **inputs}, 0))
        return BaseDataset(samples)

    Registry.register_dataset("rows_of_peers")(rows_of_peers)


def serve(job: Job) -> Opened:
    """Open what Olive made."""
    run, version = serve_graph(Path(job["files"]) / NAME, job["threads"])
    return run, f"olive-ai {importlib.metadata.version('olive-ai')}, {version}"


if __name__ == "__main__":
    main(make, serve)
