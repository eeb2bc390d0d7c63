"""llm-compressor and GPTQModel, with their defaults, on the calibration tokens of benchmarks/rounding.py.

    python rounding_worker.py calibration.safetensors job.json peer.safetensors

calibration.safetensors: each batch of the model's inputs, without padding, as tensors `NUMBER NAME`.
job.json: model, architecture (a class of transformers), blocks (classes), layers (names of those to
quantize), method, bits, and group_size (-1: one scale for a row). peer.safetensors gets the tensors of the
float model with dequantized weights. The last line of the output is the seconds that it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors.torch import load_file, save_file

Batch = dict[str, torch.Tensor]


def read_batches(path: str) -> list[Batch]:
    """Return the calibration batches."""
    batches: dict[int, Batch] = {}
    for key, tensor in load_file(path).items():
        number, _, name = key.partition(" ")
        batches.setdefault(int(number), {})[name] = tensor
    return [batches[number] for number in sorted(batches)]


def quantize_with_llm_compressor(job: dict[str, Any], batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Quantize with GPTQModifier or AWQModifier; an architecture that its tracer refuses, in one piece."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        forward_quantize,
    )
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    per_group = {"strategy": "group", "group_size": job["group_size"]}
    size = per_group if job["group_size"] > 0 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=job["bits"], type="int", symmetric=True, **size)
    groups = {"group_0": QuantizationScheme(targets=job["layers"], weights=weights)}
    for pipeline in ("sequential", "basic"):
        recipe = [AWQModifier(), QuantizationModifier(config_groups=groups)]
        if job["method"].endswith("gptq"):
            recipe = [GPTQModifier(config_groups=groups)]
        model = getattr(transformers, job["architecture"]).from_pretrained(job["model"]).eval()
        names = list(model.state_dict())
        data: Any = torch.utils.data.DataLoader(cast("Any", batches), batch_size=None)
        try:
            oneshot(
                model=model, dataset=data, recipe=recipe, pipeline=pipeline, sequential_targets=job["blocks"]
            )
            break
        except Exception as error:
            print(f"{pipeline}: {error}", file=sys.stderr)
            if pipeline == "basic":
                raise
    state = model.state_dict()
    with torch.no_grad():
        for name in job["layers"]:
            module = model.get_submodule(name)
            values = forward_quantize(module, module.weight, "weight", module.quantization_scheme.weights)
            state[f"{name}.weight"] = values
    return {name: state[name] for name in names}


def quantize_with_gptqmodel(job: dict[str, Any], batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Quantize with GPTQModel."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it needs two, and takes one for two cores
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=job["bits"], group_size=job["group_size"])
    wrapper = GPTQModel.load(job["model"], config, device="cpu", dtype=torch.float32)
    samples = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for batch in batches
        for ids in batch["input_ids"]
    ]
    wrapper.quantize(samples, batch_size=8)
    model = getattr(transformers, job["architecture"]).from_pretrained(job["model"])
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, module in wrapper.model.named_modules():
        if name in job["layers"]:
            state[f"{name}.weight"] = module.dequantize_weight().T
    return state


def main(calibration: str, job_file: str, output: str) -> None:
    """Quantize, and write the weights and the seconds."""
    job, batches = json.loads(Path(job_file).read_text(encoding="utf-8")), read_batches(calibration)
    torch.set_num_threads(1)
    start = time.perf_counter()
    peer = quantize_with_gptqmodel if job["method"].startswith("gptqmodel") else quantize_with_llm_compressor
    state = peer(job, batches)
    seconds = time.perf_counter() - start
    save_file({name: value.float().contiguous().clone() for name, value in state.items()}, output)
    print(round(seconds, 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
