"""Runs a torch artifact: the baseline of every comparison, and the parent of every exported graph."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from smelt.core.artifact import Artifact
from smelt.core.files import read_json
from smelt.runtime.backends.device import torch_device
from smelt.runtime.backends.torch_threads import TorchThreads
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.models.checkpoint import load_model
from smelt.runtime.predict import takes_types
from smelt.runtime.text.tools import TextTools


@dataclass
class _State:
    """sentences: int64 [R], which row of the batch each row goes on from; beams of one share it."""

    encoded: BaseModelOutput
    mask: torch.Tensor
    cache: EncoderDecoderCache
    sentences: Tokens


class TorchRunner:
    """A `Runner` over a transformers model in PyTorch, float32, on the CPU or a CUDA device.

    Quantized layers compute as the CPU's runtime does, so a model with any stays on the CPU.
    """

    name = "torch"
    version = str(torch.__version__)

    def __init__(self, artifact: Artifact, threads: int | None = None, device: str = "auto") -> None:
        self.folder = artifact.path
        self.config: dict[str, Any] = read_json(artifact.path / "config.json")
        self.generation_config: dict[str, Any] = read_json(artifact.path / "generation_config.json")
        self.text = TextTools(self.folder, self.config, self.generation_config)
        self.model, edits = load_model(artifact.path)
        quantized = any(edit["op"] == "quantize" for edit in edits)
        self.device = "cpu" if quantized else torch_device(device)
        self.model.to(self.device)
        self._threads = TorchThreads(threads)  # the last line: a model that does not load changes nothing

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]."""
        inputs = {
            "input_ids": self._there(batch.input_ids),
            "attention_mask": self._there(batch.attention_mask),
        }
        if batch.token_type_ids is not None and takes_types(self.config):
            inputs["token_type_ids"] = self._there(batch.token_type_ids)
        logits: Logits = self.model(**inputs).logits.cpu().numpy()
        return logits

    @torch.inference_mode()
    def encode(self, batch: Batch) -> _State:
        """Run the encoder and start an empty cache."""
        mask = self._there(batch.attention_mask)
        encoded = self.model.get_encoder()(self._there(batch.input_ids), attention_mask=mask)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return _State(encoded, mask, cache, np.arange(len(batch.input_ids)))

    @torch.inference_mode()
    def decode_step(self, state: _State, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]); return float32 [B, V]."""
        out = self.model(
            decoder_input_ids=self._there(tokens)[:, None],
            encoder_outputs=state.encoded,
            attention_mask=state.mask,
            past_key_values=state.cache,
            use_cache=True,
        )
        logits: Logits = out.logits[:, -1].cpu().numpy()
        return logits

    @torch.inference_mode()
    def reorder(self, state: _State, rows: Tokens) -> _State:
        """Return the state whose row i is the row rows[i] of `state`; what beams share is not copied."""
        there = self._there(np.ascontiguousarray(rows))
        state.cache.self_attention_cache.reorder_cache(there)
        sentences = state.sentences[rows]
        if not np.array_equal(sentences, state.sentences):
            state.sentences = sentences
            state.cache.cross_attention_cache.reorder_cache(there)
            hidden = state.encoded.last_hidden_state
            assert hidden is not None
            state.encoded = BaseModelOutput(hidden.index_select(0, there))
            state.mask = state.mask.index_select(0, there)
        return state

    def _there(self, values: Tokens) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def close(self) -> None:
        """Free the model."""
        self.model = None
        self._threads.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
