"""Decoding steps on ONNX Runtime's CUDA provider over stub libraries; a script, see `main`."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.processes.cuda_rig import copied_bytes

ROWS, LENGTH, TOP = 8, 20, 3


def main(requests: dict[str, Any]) -> dict[str, Any]:
    """Decode some tokens with the graphs of an encoder-decoder, and reorder its caches.

    Args:
        requests: `folder`, with the graphs; `is_prompt`: see `read_prompt`; `fixed`: see `write_in_place`.
            LOCAL_RANK, if set, is the
            process's number among several.

    Returns:
        `device_ids`: of the session and of the values. `step`, `top`, `reorder`, `reorder_shared`: bytes
        copied. `caches`, `logits`: the sizes of the caches, and of the logits of a step.
    """
    if requests.get("fixed"):
        return write_in_place(Path(requests["folder"]))
    if requests.get("is_prompt"):
        return read_prompt(Path(requests["folder"]))
    from smelt.generation.generating_runners import EncoderDecoderRunner
    from smelt.runtimes import device
    from smelt.runtimes.onnx_backend import OnnxBackend

    if "LOCAL_RANK" in os.environ:
        device.is_distributed = lambda: True  # type: ignore[assignment]
    graphs = EncoderDecoderRunner.graphs
    backend = OnnxBackend(Path(requests["folder"]), graphs, "ort-cuda", 1, "cuda")
    mask = np.ones((ROWS, LENGTH), np.int64)
    state = backend.start(ROWS, {"input_ids": mask, "attention_mask": mask}, {"encoder_attention_mask": mask})
    token = {"input_ids": mask[:, :1]}
    for _ in range(3):
        backend.step(state, token)
    answer: dict[str, Any] = {"caches": sum(_size(value) for value in state.caches)}
    answer["types"] = sorted({value.data_type() for value in state.caches})
    copied_bytes()
    answer["logits"] = backend.step(state, token).nbytes
    answer["step"] = copied_bytes()
    answer["top_shape"] = backend.step_top(state, token, TOP).tokens.shape
    copied_bytes()  # the first call opened a session
    backend.step_top(state, token, TOP)
    answer["top"] = copied_bytes()
    backend.reorder_cache(state, np.arange(ROWS)[::-1].copy(), False)
    answer["reorder"] = copied_bytes()
    backend.reorder_cache(state, np.arange(ROWS // 2), True)
    answer["reorder_shared"] = copied_bytes()
    answer["shapes"] = [list(value.shape()) for value in (*state.caches, *state.shared.values())]
    options = backend._session(graphs.main.name).get_provider_options()["CUDAExecutionProvider"]
    values = [*state.caches, *state.shared.values()]
    answer["device_ids"] = sorted({int(options["device_id"]), *(_device_id(value) for value in values)})
    return answer


def read_prompt(folder: Path) -> dict[str, Any]:
    """Read prompts with the graph of a language model, as a generation does.

    Returns:
        `part`, `last`: bytes copied for a part of the prompts whose logits are not needed, and for their last
        tokens. `caches`, `logits`: sizes of the caches and of one token's logits. `places`: of the caches.
    """
    from smelt.generation.generating_runners import DecoderOnlyRunner, position_ids
    from smelt.runtimes.onnx_backend import OnnxBackend

    backend = OnnxBackend(folder, DecoderOnlyRunner.graphs, "ort-cuda", 1, "cuda")
    mask = np.ones((ROWS, LENGTH), np.int64)
    feeds = {"input_ids": mask, "attention_mask": mask, "position_ids": position_ids(mask)}
    state = backend.start(ROWS)
    copied_bytes()
    shape = list(backend.step(state, feeds, 0).shape)
    answer: dict[str, Any] = {"part": copied_bytes(), "no_logits": shape}
    state = backend.start(ROWS)
    copied_bytes()
    answer["logits"] = backend.step(state, feeds, 1).nbytes
    answer["last"] = copied_bytes()
    answer["caches"] = sum(_size(value) for value in state.caches)
    answer["places"] = sorted({value.device_name() for value in state.caches})
    return answer


def write_in_place(folder: Path) -> dict[str, Any]:
    """Run a token with the graph of a language model whose caches have a fixed length.

    Returns:
        `zeros`: whether the caches begin as zeros. `addresses`, `addresses_after`: of the caches, before and
        after. `step`: bytes copied. `caches`: their size. `places`: of the caches.
    """
    from smelt.generation.generating_runners import DecoderOnlyRunner
    from smelt.runtimes.onnx_backend import OnnxBackend

    backend = OnnxBackend(folder, DecoderOnlyRunner.graphs, "ort-cuda", 1, "cuda")
    state = backend.start(ROWS)
    answer: dict[str, Any] = {"addresses": [value.data_ptr() for value in state.caches]}
    answer["places"] = sorted({value.device_name() for value in state.caches})
    answer["caches"] = sum(_size(value) for value in state.caches)
    memory = (ctypes.string_at(value.data_ptr(), _size(value)) for value in state.caches)
    answer["zeros"] = not any(map(any, memory))
    token = np.ones((ROWS, 1), np.int64)
    feeds = {"input_ids": token, "attention_mask": token, "position_ids": token - 1}
    copied_bytes()
    backend.step(state, feeds)
    answer["step"] = copied_bytes()
    answer["addresses_after"] = [value.data_ptr() for value in state.caches]
    return answer


def _size(value: Any) -> int:
    width = {"tensor(float16)": 2, "tensor(bfloat16)": 2, "tensor(float)": 4}[value.data_type()]
    return int(np.prod(value.shape())) * width


def _device_id(value: Any) -> int:
    return int(value._get_c_value().__dlpack_device__()[1])


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
