"""Run a graph with fixed shapes as one CUDA graph: captured once, then launched as a whole.

A call launches a kernel for each node, which takes the host a few microseconds each; a short text or a single
image often takes the GPU less. A captured graph is one launch.

Source: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview.
What it requires, and how it is met here: inputs and outputs at the same addresses in every run (buffers that
are bound once), one capture for each set of shapes (`gpu_graph_id`), runs of a session from one thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.runtimes.graph_timer import timed_graph

_GRAPH_ID = "gpu_graph_id"
_NO_CAPTURE = "-1"


@dataclass(frozen=True)
class _Capture:
    """The buffers of one set of input shapes, bound; OrtValues by name."""

    binding: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    run_options: Any


class CapturedGraph:
    """A session with `enable_cuda_graph`, and its captures by shapes of the inputs.

    Args:
        session: of ONNX Runtime's CUDA provider.
        device: cuda, or cpu, which computes the same without a capture.
        device_id: of the GPU.
    """

    def __init__(self, session: Any, device: str, device_id: int) -> None:
        self._session, self._device, self._device_id = session, device, device_id
        self._captures: dict[tuple[tuple[int, ...], ...], _Capture] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cuda-graph")

    def __call__(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run once; return the outputs by name. Any thread may call."""
        with timed_graph():
            return self._thread.submit(self._run, feeds).result()

    def _run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        shapes = tuple(values.shape for values in feeds.values())
        if shapes not in self._captures:
            self._captures[shapes] = self._bind(feeds, graph_id=len(self._captures) + 1)
        capture = self._captures[shapes]
        for name, values in feeds.items():
            capture.inputs[name].update_inplace(np.ascontiguousarray(values))
        self._session.run_with_iobinding(capture.binding, capture.run_options)
        # copied, since the next run writes into the same buffers
        return {name: np.array(value.numpy()) for name, value in capture.outputs.items()}

    def _bind(self, feeds: Mapping[str, NDArray[Any]], graph_id: int) -> _Capture:
        """Return buffers for inputs of these shapes, and for outputs of the shapes that a first run has."""
        binding = self._session.io_binding()
        device = self._device, self._device_id
        inputs = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.array(values, order="C"), *device)
            for name, values in feeds.items()
        }
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        names = [output.name for output in self._session.get_outputs()]
        for name in names:
            binding.bind_output(name, *device)
        self._session.run_with_iobinding(binding, _run_options(_NO_CAPTURE))
        outputs = dict(zip(names, binding.get_outputs(), strict=True))
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return _Capture(binding, inputs, outputs, _run_options(str(graph_id)))


def _run_options(graph_id: str) -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(_GRAPH_ID, graph_id)
    return options
