"""Runners of generating models: decoder-only language models and encoder-decoder models.

A decoder-only model has one graph for prompts and single tokens. Its inputs are input_ids and position_ids
[R, S], and the attention mask of all tokens so far [R, P + S].

The encoder of an encoder-decoder model returns the keys and values of cross-attention. Every step of the
decoder takes them unchanged, with the mask of the source; beams share them. The self-attention caches of a
step are the inputs of the next one.

Shapes: B = batch, L = tokens of a row (the prompt, or the source), R = rows, S = input tokens of one call,
P = tokens of previous calls, D = width of the model, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError
from smelt.core.process_group import merge_shares, own_batches, process_count
from smelt.generation.backend import (
    GENERATION_GRAPHS,
    INPUT_FEATURES,
    Backend,
    Batch,
    Feeds,
    GraphInterface,
    Logits,
    ModelGraphs,
    Tokens,
    TopLogits,
)
from smelt.generation.config import Shortlist, read_shortlist, vocabulary_sizes
from smelt.generation.runner import ModelFiles, Runner, TokenGenerator
from smelt.models.families.registry import find_family
from smelt.models.text_rules import TextWindows
from smelt.stage import Progress, no_progress

# The input with the number of last tokens whose logits are needed, 0 for all; transformers.js' name
NUM_LOGITS_INPUT = "num_logits_to_keep"
# float32 logits per call; with more, rows or pieces of tokens are run one after another
_LOGITS_BYTES = 256 * 2**20


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether `config` (config.json) is that of a decoder-only language model."""
    names = config.get("architectures") or []
    family = find_family(config)
    return (
        family is not None
        and family.architecture == "decoder"
        and any(str(n).endswith(("ForCausalLM", "LMHeadModel")) for n in names)
    )


def position_ids(mask: Tokens) -> Tokens:
    """Return position ids [B, L] that follow the attention mask, 0 for padding, as `generate` does."""
    return np.where(mask == 0, 0, mask.cumsum(axis=1) - 1).astype(np.int64)


def token_nll(runner: Any, ids: Tokens) -> NDArray[np.float32]:
    """Return the negative log-likelihood in nats of every token but the first: int64 [B, L] -> [B, L - 1].

    Logits of all tokens are never in memory at once where they are many: rows are run one by one, and a long
    row in pieces that continue on the cache. How it is split depends on the shapes only, so that every step
    of a run is scored in the same way.

    Raises:
        RunError: the model's outputs are not finite.
    """
    num_rows, length = ids.shape[0], ids.shape[1] - 1
    max_tokens = _LOGITS_BYTES // (4 * int(runner.config["vocab_size"]))
    losses = np.empty((num_rows, length), dtype=np.float32)
    step = max(1, max_tokens // length)
    for row_start in range(0, num_rows, step):
        row_slice = slice(row_start, min(num_rows, row_start + step))
        count = row_slice.stop - row_start
        state = runner.start(count)
        chunk_length = length if count > 1 else max(1, max_tokens)
        for begin in range(0, length, chunk_length):
            end = min(length, begin + chunk_length)
            inputs = np.ascontiguousarray(ids[row_slice, begin:end])
            logits = runner.extend(state, inputs, np.ones_like(inputs))
            losses[row_slice, begin:end] = nll_from_logits(logits, ids[row_slice, begin + 1 : end + 1])
    if not np.isfinite(losses).all():
        raise RunError(
            "the model's outputs are not finite, so perplexity is undefined: a weight is not finite,"
            " or a value exceeds the range of its type. Check the step that created the model; if"
            " it sets dtype, use fp32.",
            code="non-finite-outputs",
        )
    return losses


def nll_from_logits(logits: Logits, targets: Tokens) -> NDArray[np.float32]:
    """Return -log softmax(logits)[target]: float32 [B, S, V], int64 [B, S] -> float32 [B, S]."""
    import torch

    values = torch.from_numpy(logits)
    target_logits = values.gather(2, torch.from_numpy(np.ascontiguousarray(targets))[..., None])[..., 0]
    losses: NDArray[np.float32] = (values.logsumexp(dim=2) - target_logits).numpy()
    return losses


def window_nll(
    runner: Any, text: TextWindows, batch_size: int = 32, progress: Progress = no_progress
) -> list[float]:
    """Return for each window of `text` the summed loss of its scored tokens, nats."""
    return last_tokens_nll(runner, text.ids, text.scored_tokens, batch_size, progress)


def last_tokens_nll(
    runner: Any,
    token_rows: Sequence[Sequence[int] | Tokens],
    counts: Sequence[int],
    batch_size: int = 32,
    progress: Progress = no_progress,
) -> list[float]:
    """Return for each of `token_rows`, token ids, the summed loss of its last `counts` tokens, nats.

    A batch contains rows of one length only, so nothing is padded.
    """
    groups: dict[int, list[int]] = {}
    for index, ids in enumerate(token_rows):
        groups.setdefault(len(ids), []).append(index)
    sums: dict[int, float] = {}
    batches = [
        indices[start : start + batch_size]
        for indices in groups.values()
        for start in range(0, len(indices), batch_size)
    ]
    for _, batch_indices in own_batches(batches):
        losses = token_nll(
            runner, np.stack([np.asarray(token_rows[i], dtype=np.int64) for i in batch_indices])
        )
        for i, row in zip(batch_indices, losses, strict=True):
            sums[i] = float(row[-counts[i] :].sum(dtype=np.float64))
        progress(min(len(token_rows), len(sums) * process_count()), len(token_rows), "windows")
    return merge_shares(sums)


@dataclass
class DecoderOnlyState:
    """backend_state: of the backend, with keys and values of P tokens. mask: int64 [R, P], 1 for tokens."""

    backend_state: Any
    mask: Tokens


class DecoderOnlyRunner(Runner):
    """A `Runner` of a language model; prompts are padded on the left."""

    chunked_prefill: ClassVar[bool] = True
    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(
            "model", frozenset({"input_ids", "attention_mask", "position_ids"}), frozenset({"logits"})
        ),
        generation_graphs=GENERATION_GRAPHS,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return float32 [B, L, V] for a batch padded on the right."""
        return self.extend(self.start(batch.input_ids.shape[0]), batch.input_ids, batch.attention_mask)

    def encode(self, batch: Batch) -> DecoderOnlyState:
        """Run all tokens but the last of a batch that is padded on the left."""
        state = self.start(batch.input_ids.shape[0])
        if batch.input_ids.shape[1] > 1:
            self._feed_chunks(state, batch.input_ids[:, :-1], batch.attention_mask[:, :-1], 0)
        return state

    def decode_step(self, state: DecoderOnlyState, tokens: Tokens) -> Logits:
        """Run one token per row (int64 [R]), update `state` in place, return float32 [R, V]."""
        ids = tokens[:, None]
        return self._step(state, ids, np.ones_like(ids), 1)[:, -1]

    def decode_top(self, state: DecoderOnlyState, tokens: Tokens, count: int) -> TopLogits:
        """Run one token per row (int64 [R]), update `state` in place, return the highest logits."""
        ids = tokens[:, None]
        full_mask, feeds = _continued_feeds(state, ids, np.ones_like(ids))
        top = self.backend.step_top(state.backend_state, feeds, count)
        state.mask = full_mask
        return top

    def start(self, rows: int) -> DecoderOnlyState:
        """Return the state of `rows` empty rows."""
        return DecoderOnlyState(self.backend.start(rows), np.zeros((rows, 0), dtype=np.int64))

    def extend(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int = 0) -> Logits:
        """Run int64 [R, S] with their mask, update `state`, return float32 [R, S or last, V].

        Args:
            state: changed in place.
            ids: input tokens; S > 1 on a state that has tokens is only for R = 1.
            mask: 1 for tokens.
            last: number of last tokens whose logits are needed; 0 for all.

        Raises:
            InputError: the backend cannot take several tokens with a filled cache for these rows.
            RunError: more tokens than the engines' size limit, or the device failed.
        """
        parts = self._feed_chunks(state, ids, mask, last or ids.shape[1])
        return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    def _feed_chunks(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int) -> list[Logits]:
        """Run as many tokens at once as the backend takes; return the logits of the `last` ones in parts."""
        length = ids.shape[1]
        most = self.backend.max_tokens_per_call or length
        parts = []
        for start in range(0, length, most):
            end = min(length, start + most)
            num_logits = min(end - start, max(0, end - (length - last)))
            logits = self._step(state, ids[:, start:end], mask[:, start:end], num_logits)
            if num_logits:
                parts.append(logits[:, -num_logits:])
        return parts

    def _step(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int) -> Logits:
        full_mask, feeds = _continued_feeds(state, ids, mask)
        logits = self.backend.step(state.backend_state, feeds, last)
        state.mask = full_mask
        return logits

    def reorder_cache(self, state: DecoderOnlyState, rows: Tokens) -> DecoderOnlyState:
        """Return the state whose row i is row rows[i] (int64 [R]) of `state`, which becomes invalid."""
        if not np.array_equal(rows, np.arange(state.mask.shape[0])):
            self.backend.reorder_cache(
                state.backend_state, rows, shared=True
            )  # rows of one text share nothing
            state.mask = state.mask[rows]
        return state


def _continued_feeds(state: DecoderOnlyState, ids: Tokens, mask: Tokens) -> tuple[Tokens, Feeds]:
    """Return the mask of all tokens so far and of `ids` [R, S], and the inputs of the graph for `ids`."""
    full_mask = np.concatenate([state.mask, mask], axis=1)
    positions = position_ids(full_mask)[:, -ids.shape[1] :]
    return full_mask, {"input_ids": ids, "attention_mask": full_mask, "position_ids": positions}


def prefill(runner: Runner, batch: Batch, prompt: Tokens, single_prefill: bool) -> tuple[Any, Logits]:
    """Run the prompts of a batch; return its state and the logits of each row's next token, float32 [B, V].

    Args:
        runner: of a generating model.
        batch: the prompts, or the inputs of an encoder.
        prompt: int64 [B, P], the prompts, or the first tokens of the decoder next to an encoder.
        single_prefill: run prompts with their last token in one call, as a graph with the generation loop
            does: int8 scales, which depend on all inputs of a call, are then equal. Only for a
            `DecoderOnlyRunner`.
    """
    if single_prefill and isinstance(runner, DecoderOnlyRunner):
        state = runner.start(len(prompt))
        return state, runner.extend(state, batch.input_ids, batch.attention_mask, 1)[:, -1]
    state_after = runner.encode(batch)
    # `encode` of a decoder-only model runs all tokens of a prompt but its last
    first_tokens = prompt if runner.config.get("is_encoder_decoder") else prompt[:, -1:]
    for tokens in first_tokens.T:
        logits = runner.decode_step(state_after, tokens)
    return state_after, logits


ENCODER_GRAPH, DECODER_GRAPH = "encoder_model", "decoder_with_past_model"


@dataclass
class EncoderDecoderState:
    """backend_state: of the backend. batch_rows: int64 [R], the batch row that each row continues.

    excluded_tokens: bool [B, V], tokens that are excluded in a row of the batch; None: none.
    """

    backend_state: Any
    batch_rows: Tokens
    excluded_tokens: NDArray[np.bool_] | None = None


class EncoderDecoderRunner(Runner):
    """A `Runner` of a model that reads a text and generates another; batches are padded on the right.

    shortlist: restricts the tokens of a text; None: all tokens are allowed.
    """

    shortlist: Shortlist | None

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        encoder=GraphInterface(
            ENCODER_GRAPH, frozenset({"input_ids", "attention_mask"}), frozenset({"last_hidden_state"})
        ),
        main=GraphInterface(
            DECODER_GRAPH, frozenset({"input_ids", "encoder_attention_mask"}), frozenset({"logits"})
        ),
        generation_graphs=GENERATION_GRAPHS,
    )

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        super().__init__(files, backend, generator)
        self.shortlist = read_shortlist(files.folder, files.config)

    def encoder_outputs(self, batch: Batch) -> dict[str, NDArray[np.floating[Any]]]:
        """Return the encoder's outputs by name: hidden states [B, L, D], keys and values [B, H, L, d]."""
        return self.backend.call(ENCODER_GRAPH, batch.source)

    def encode(self, batch: Batch) -> EncoderDecoderState:
        """Run the encoder; nothing is decoded yet."""
        num_rows = batch.input_ids.shape[0]
        shared = {"encoder_attention_mask": batch.attention_mask}
        disallowed = None
        if self.shortlist is not None:
            disallowed = ~self.shortlist.allowed_tokens(batch, vocabulary_sizes(self.config)[1])
        return EncoderDecoderState(
            self.backend.start(num_rows, batch.source, shared), np.arange(num_rows), disallowed
        )

    def decode_step(self, state: EncoderDecoderState, tokens: Tokens) -> Logits:
        """Run one token per row (int64 [R]), update `state` in place, return float32 [R, V].

        Tokens that are not on a row's shortlist have -inf.
        """
        logits = self.backend.step(state.backend_state, {"input_ids": tokens.reshape(-1, 1)})
        if state.excluded_tokens is not None:
            logits[state.excluded_tokens[state.batch_rows]] = -np.inf
        return logits

    @property
    def reduces_logits(self) -> bool:
        """Return whether `decode_top` can be used: a shortlist needs all logits."""
        return self.shortlist is None and self.backend.reduces_logits

    def decode_top(self, state: EncoderDecoderState, tokens: Tokens, count: int) -> TopLogits:
        """Run one token per row (int64 [R]), update `state` in place, return the highest logits."""
        return self.backend.step_top(state.backend_state, {"input_ids": tokens.reshape(-1, 1)}, count)

    def reorder_cache(self, state: EncoderDecoderState, rows: Tokens) -> EncoderDecoderState:
        """Return the state whose row i is row rows[i] of `state`; tensors shared by beams are not copied."""
        sentences = state.batch_rows[rows]
        crosses_rows = not np.array_equal(sentences, state.batch_rows)
        if crosses_rows or not np.array_equal(rows, np.arange(len(rows))):
            self.backend.reorder_cache(state.backend_state, rows, shared=crosses_rows)
        state.batch_rows = sentences
        return state


class SpeechRunner(EncoderDecoderRunner):
    """A `Runner` of a model that reads spectrograms of audio (`AudioBatch`) and generates a text."""

    graphs: ClassVar[ModelGraphs] = replace(
        EncoderDecoderRunner.graphs,
        encoder=GraphInterface(ENCODER_GRAPH, frozenset({INPUT_FEATURES}), frozenset({"last_hidden_state"})),
    )
