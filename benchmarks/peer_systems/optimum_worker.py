"""Optimum: its export, its quantizer with the settings for AVX512-VNNI, its own loop over ONNX Runtime."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTModelForSequenceClassification, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
from transformers import AutoTokenizer

from peer_systems.worker import Case, Job, Opened, Rows, main

CLASSES = {"marian": ORTModelForSeq2SeqLM, "bert": ORTModelForSequenceClassification}


def make(job: Job) -> None:
    """Export; int8: quantize each graph that the float system exported."""
    files = Path(job["files"])
    if job["variant"] == "fp32":
        CLASSES[job["work"]].from_pretrained(job["model"], export=True).save_pretrained(files)
        AutoTokenizer.from_pretrained(job["model"]).save_pretrained(files)
        return
    source = Path(job["from"])
    wanted = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
    for graph in sorted(source.glob("*.onnx")):
        quantizer = ORTQuantizer.from_pretrained(source, file_name=graph.name)
        quantizer.quantize(save_dir=files, quantization_config=wanted, file_suffix="")
    for path in source.iterdir():
        if path.suffix != ".onnx" and not (files / path.name).exists():
            (files / path.name).write_bytes(path.read_bytes())


def serve(job: Job) -> Opened:
    """Open the folder as its pages show it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job["threads"]
    options.inter_op_num_threads = 1
    torch.set_num_threads(job["threads"])
    model = CLASSES[job["work"]].from_pretrained(job["files"], session_options=options)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("optimum-onnx", "onnxruntime")]
    if job["work"] == "bert":
        return lambda rows, case: _classify(model, rows), ", ".join(versions)
    tokenizer = AutoTokenizer.from_pretrained(job["files"])
    return lambda rows, case: _translate(model, tokenizer, rows, case), ", ".join(versions)


def _classify(model: Any, rows: Rows) -> Rows:
    ids = torch.tensor(rows)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    return list(model(**inputs).logits.tolist())


def _translate(model: Any, tokenizer: Any, texts: Rows, case: Case) -> Rows:
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    wanted = {"num_beams": case["beams"], "do_sample": False, "max_new_tokens": case["new_tokens"]}
    return list(tokenizer.batch_decode(model.generate(**inputs, **wanted), skip_special_tokens=True))


if __name__ == "__main__":
    main(make, serve)
