"""PyTorch backend: a transformers model in place of graphs.

It is the baseline of every comparison, and the parent of every exported graph.

Shapes: R = rows, S = input tokens of one call, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from smelt.core.errors import InputError
from smelt.core.system import available_bytes
from smelt.generation.backend import (
    Feeds,
    Logits,
    ModelGraphs,
    NoGenerationGraphs,
    Tokens,
    TopLogits,
    top_logits,
)
from smelt.models.checkpoint import load_model, widened_bytes
from smelt.models.families.registry import decoder_logits
from smelt.models.sentence_model import head_output
from smelt.models.tokenizer import uses_token_types
from smelt.models.user_module import ArraysOutput
from smelt.quantization.layers import limit_weight_cache
from smelt.runtimes.device import TorchThreads, torch_device
from smelt.runtimes.graph_timer import timed_graph


@dataclass
class TorchDecodeState:
    """cache: keys and values. encoder_outputs, encoder_mask: its states and token mask, else None."""

    cache: Any
    encoder_outputs: BaseModelOutput | None = None
    encoder_mask: Tensor | None = None


class TorchBackend(NoGenerationGraphs):
    """A `Backend` over a model in float32, on the CPU or a CUDA device.

    Quantized layers compute as the CPU's runtime does, on either device. A causal model in 16 bits whose
    float32 weights do not fit into memory stays in its file (`load_model`).
    """

    name = "torch"
    version = str(torch.__version__)
    max_tokens_per_call = None
    max_total_tokens = None
    prefers_stepwise = False

    def __init__(
        self,
        folder: Path,
        graphs: ModelGraphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> None:
        self._folder, self._graphs = folder, graphs
        causal = graphs.encoder is None and graphs.uses_cache
        fits_memory = torch_device(device) != "cpu" or widened_bytes(folder) <= available_bytes()
        self.model, edits = load_model(folder, widen=fits_memory or not causal)
        self._types = uses_token_types(self.model.config.to_dict())
        self.device = torch_device(device)
        if any(edit["op"] == "quantize" for edit in edits):  # half: other models may run in this process too
            free_bytes = torch.cuda.mem_get_info()[0] if self.device == "cuda" else available_bytes()
            limit_weight_cache(self.model, free_bytes // 2)
        self.model.to(self.device)
        if self.device == "cuda":  # as ONNX Runtime computes: float32 is float32, also in convolutions
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._threads = TorchThreads(threads)  # last, so that a model that does not load changes nothing

    def compile(self) -> None:
        """Compile the model's forward at its first call, for any batch size and length (torch.compile)."""
        self._open_model.compile(dynamic=True)

    @torch.inference_mode()
    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run the encoder or the whole model once; return its states, or its logits or vectors."""
        inputs = {n: self._to_device(v) for n, v in feeds.items() if n != "token_type_ids" or self._types}
        interface = next(each for each in self._graphs.call_order if each.name == graph)
        if interface.compute is not None:
            [output_name] = interface.outputs
            vectors = self._run(partial(interface.compute, self._open_model), **inputs)
            return {output_name: vectors.cpu().numpy()}
        if graph != self._graphs.main.name:
            return {
                "last_hidden_state": self._run(self._open_model.get_encoder(), **inputs)
                .last_hidden_state.cpu()
                .numpy()
            }
        output = self._run(self._open_model, **inputs)
        if isinstance(output, ArraysOutput):
            return {name: value.cpu().numpy() for name, value in output.arrays.items()}
        [name] = self._graphs.main.outputs
        return {name: head_output(output).cpu().numpy()}

    @torch.inference_mode()
    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> TorchDecodeState:
        """Run the encoder, if there is one; start with empty caches."""
        model = self._open_model
        if feeds is None or shared is None:
            return TorchDecodeState(DynamicCache())
        mask = self._to_device(shared["encoder_attention_mask"])
        inputs = {name: self._to_device(values) for name, values in feeds.items()}
        encoded = self._run(model.get_encoder(), **inputs)
        return TorchDecodeState(EncoderDecoderCache(DynamicCache(), DynamicCache()), encoded, mask)

    @torch.inference_mode()
    def step(self, held: TorchDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return float32 [R, V] with an encoder, else [R, last, V]."""
        logits: Logits = self._advance(held, feeds, last).cpu().numpy()
        return logits

    @torch.inference_mode()
    def step_top(self, held: TorchDecodeState, feeds: Feeds, count: int) -> TopLogits:
        """Run int64 [R, S]; return the `count` highest logits of the last token, chosen on the device."""
        logits = self._advance(held, feeds, 1)
        return top_logits(logits[:, -1] if logits.dim() == 3 else logits, count)

    @property
    def reduces_logits(self) -> bool:
        """Return whether the logits are on a GPU."""
        return self.device == "cuda"

    def _advance(self, held: TorchDecodeState, feeds: Feeds, last: int) -> Tensor:
        """Run a step; return its logits on the device."""
        if held.encoder_outputs is not None:
            output = self._run(
                self.model,
                decoder_input_ids=self._to_device(feeds["input_ids"]),
                encoder_outputs=held.encoder_outputs,
                attention_mask=held.encoder_mask,
                past_key_values=held.cache,
                use_cache=True,
            )
            return cast("Tensor", output.logits)[:, -1]
        hidden = self._run(
            self.model.base_model,
            input_ids=self._to_device(feeds["input_ids"]),
            attention_mask=self._to_device(feeds["attention_mask"]),
            position_ids=self._to_device(feeds["position_ids"]),
            past_key_values=held.cache,
            use_cache=True,
        ).last_hidden_state
        hidden = hidden[:, hidden.shape[1] - last :]
        if not last:
            return torch.empty((*hidden.shape[:2], 0))
        return cast("Tensor", decoder_logits(self.model, hidden)).float()

    @torch.inference_mode()
    def reorder_cache(self, held: TorchDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i]; empty caches have no rows yet."""
        indices = self._to_device(rows)
        if held.encoder_outputs is None or held.encoder_mask is None:
            held.cache.reorder_cache(indices)
            return
        held.cache.self_attention_cache.reorder_cache(indices)
        if shared:
            held.cache.cross_attention_cache.reorder_cache(indices)
            hidden = held.encoder_outputs.last_hidden_state
            assert hidden is not None
            held.encoder_outputs = BaseModelOutput(hidden.index_select(0, indices))
            held.encoder_mask = held.encoder_mask.index_select(0, indices)

    def _run(self, module: Any, **inputs: Any) -> Any:
        with timed_graph(torch.cuda.current_stream if self.device == "cuda" else None):
            return module(**inputs)

    @property
    def _open_model(self) -> Any:
        if self.model is None:
            raise InputError(f"{self._folder}: this model is closed. Load it again.", code="closed-model")
        return self.model

    def _to_device(self, values: Tokens) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def close(self) -> None:
        """Free the model."""
        self.model = None
        self._threads.release()
