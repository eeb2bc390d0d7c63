"""Runs a torch artifact of a decoder-only language model.

Shapes: B = batch, L = prompt, S = tokens fed at once, P = tokens fed before, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from smelt.core.artifact import Artifact
from smelt.core.files import read_json
from smelt.runtime.backends.device import torch_device
from smelt.runtime.backends.torch_threads import TorchThreads
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.causal import positions
from smelt.runtime.models.checkpoint import load_model
from smelt.runtime.text.tools import TextTools


@dataclass
class CausalState:
    """mask: int64 [B, P], 1 where a token was fed. cache: the keys and values of these P places."""

    mask: Tokens
    cache: DynamicCache


class TorchCausalRunner:
    """A `CausalRunner` over a transformers model in PyTorch, float32, on the CPU or a CUDA device.

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
        """Return float32 [B, L, V] for a batch padded on the right."""
        return self.extend(self.start(batch.input_ids.shape[0]), batch.input_ids, batch.attention_mask)

    @torch.inference_mode()
    def encode(self, batch: Batch) -> CausalState:
        """Feed all tokens but the last of a batch that is padded on the left."""
        state = self.start(batch.input_ids.shape[0])
        if batch.input_ids.shape[1] > 1:
            self._hidden(state, batch.input_ids[:, :-1], batch.attention_mask[:, :-1])
        return state

    @torch.inference_mode()
    def decode_step(self, state: CausalState, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]); return float32 [B, V]."""
        ids = tokens[:, None]
        return self._logits(self._hidden(state, ids, np.ones_like(ids))[:, -1])

    def start(self, rows: int) -> CausalState:
        """Return the state of `rows` rows that have seen nothing."""
        return CausalState(np.zeros((rows, 0), dtype=np.int64), DynamicCache())

    @torch.inference_mode()
    def extend(self, state: CausalState, ids: Tokens, mask: Tokens, last: int = 0) -> Logits:
        """Feed int64 [B, S] with their mask, advance `state`, return float32 [B, S, V].

        With `last`, only the logits of so many last tokens are computed: [B, last, V].
        """
        return self._logits(self._hidden(state, ids, mask)[:, -last:])  # 0 is all

    @torch.inference_mode()
    def reorder(self, state: CausalState, rows: Tokens) -> CausalState:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which is used up."""
        if state.cache.get_seq_length():
            state.cache.batch_select_indices(torch.from_numpy(rows).to(self.device))
        state.mask = state.mask[rows]
        return state

    def _hidden(self, state: CausalState, ids: Tokens, mask: Tokens) -> Tensor:
        state.mask = np.concatenate([state.mask, mask], axis=1)
        places = positions(state.mask)[:, -ids.shape[1] :]
        hidden: Tensor = self.model.base_model(
            self._there(ids),
            attention_mask=self._there(state.mask),
            position_ids=self._there(places),
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Logits:
        logits: Logits = self.model.get_output_embeddings()(hidden).float().cpu().numpy()
        return logits

    def _there(self, values: Tokens) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

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
