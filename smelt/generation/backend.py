"""The interface of every runtime: batches of tokens in, graphs called by name, caches from call to call.

A backend handles files, memory, threads and devices; the runners (`generating_runners.py`,
`smelt/runtimes/single_call_runners.py`) prepare the inputs. Graphs, inputs and outputs have Optimum's names.
A graph passes its output `present.*` to its next call, which takes it as `past_key_values.*`.

Shapes: B = batch, L = tokens of the longest row, R = rows, S = input tokens of one call, P = tokens of
previous calls, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]
# The output name of an encoder's graph: a classifier's logits, or the vectors of texts.
ENCODER_OUTPUTS = ("logits", "sentence_embedding")


@dataclass(frozen=True)
class TopLogits:
    """The K highest logits of each row, the highest first; equal ones are in the order of their tokens.

    values: float32 [R, K]. tokens: int64 [R, K]. log_probs: float32 [R, K], log softmax over all tokens.
    """

    values: Logits
    tokens: Tokens
    log_probs: Logits


def top_logits(logits: Any, count: int) -> TopLogits:
    """Return the `count` highest of `logits`, a torch tensor [R, V] that stays on its device.

    Of equal logits the lower token comes first. torch's `topk` has no order of equal values, and on a GPU may
    choose others in each run, so it sorts keys without equal ones: a logit's bits, as an integer of the same
    order, then its token.
    """
    import torch

    scores = logits.float() + 0.0  # -0.0 equals 0.0
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) - torch.arange(scores.shape[-1], device=scores.device)
    tokens = keys.topk(min(count, scores.shape[-1]), dim=-1).indices
    values = scores.gather(-1, tokens)
    log_probs = scores.log_softmax(dim=-1).gather(-1, tokens)
    return TopLogits(values.cpu().numpy(), tokens.cpu().numpy(), log_probs.cpu().numpy())


class FeedBatch:
    """A batch without tokens."""

    @property
    def feeds(self) -> dict[str, NDArray[Any]]:
        """The inputs of the model by name, each [B, ...]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Batch:
    """Tokenized texts, padded on the right.

    input_ids: int64 [B, L]; attention_mask: int64 [B, L], 1 where a token is; token_type_ids:
    int64 [B, L] for text pairs, else None.
    """

    input_ids: Tokens
    attention_mask: Tokens
    token_type_ids: Tokens | None = None

    @property
    def source(self) -> Feeds:
        """The inputs of an encoder, or of a graph with the generation loop."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    def select(self, rows: Sequence[int] | Tokens) -> Batch:
        """Return some rows, without columns that are padding in all of them."""
        used_columns = self.attention_mask[rows].any(axis=0)
        types = self.token_type_ids
        return Batch(
            self.input_ids[rows][:, used_columns],
            self.attention_mask[rows][:, used_columns],
            None if types is None else types[rows][:, used_columns],
        )


INPUT_FEATURES = "input_features"


@dataclass(frozen=True)
class AudioBatch(Batch):
    """Spectrograms of audio, which have no tokens and are not padded: `input_ids` are 0, the mask is 1.

    input_ids, attention_mask: int64 [B, T] for the T states of the encoder. load: reads the audio and returns
    the spectrograms, so that a list of batches holds none.
    """

    load: Callable[[], NDArray[np.float32]] = field(kw_only=True)

    @property
    def input_features(self) -> NDArray[np.float32]:
        """The spectrograms, float32 [B, M, F], with M mel bins and F frames."""
        return self.load()

    @property
    def source(self) -> Feeds:
        """The spectrograms."""
        return {INPUT_FEATURES: self.input_features}

    def select(self, rows: Sequence[int] | Tokens) -> AudioBatch:
        """Return some rows."""
        return AudioBatch(
            self.input_ids[rows], self.attention_mask[rows], load=lambda: self.input_features[rows]
        )


FloatArray = TypeVar("FloatArray", NDArray[np.float32], NDArray[np.float64])


def check_finite_outputs(outputs: FloatArray) -> FloatArray:
    """Return `outputs`, [n, ...], if all of them are finite.

    Raises:
        RunError: `non-finite-outputs`.
    """
    invalid = np.flatnonzero(~np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1))
    if not len(invalid):
        return outputs
    raise RunError(
        f"The model's outputs are NaN or infinite for {len(invalid):,} of {len(outputs):,} examples (the"
        f" first is example {invalid[0] + 1}). A weight is not finite, or a value exceeds the range"
        " of its type. Check the step that created the model; if it sets dtype, use fp32.",
        code="non-finite-outputs",
    )


PRESENT_PREFIX, PAST_PREFIX = "present.", "past_key_values."
# graphs with the whole generation loop, from `input_ids` to `sequences`
GREEDY_GRAPH, BEAM_SEARCH_GRAPH = "generate", "generate_beams"
GENERATION_GRAPHS = (GREEDY_GRAPH, BEAM_SEARCH_GRAPH)
Feeds: TypeAlias = Mapping[str, NDArray[Any]]
"""Input name -> int64 array. Names that a graph does not have are ignored."""


@dataclass(frozen=True)
class GraphInterface:
    """A graph's name, and its required inputs and outputs, without caches.

    compute: returns the output of a torch model, given it and the inputs by name; None where the graph is the
    model's forward, or its encoder.
    """

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    compute: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ModelGraphs:
    """The graphs of a model.

    main: gives the logits. encoder: called once per batch; every call of `main` takes its outputs.
    independent: graphs of other inputs, which are called alone.
    uses_cache: whether `main` is called repeatedly, each time with the caches of the previous call.
    generation_graphs: names of graphs with all calls, from `input_ids` to `sequences`; optional in an export.
    """

    main: GraphInterface
    encoder: GraphInterface | None = None
    uses_cache: bool = True
    generation_graphs: tuple[str, ...] = ()
    independent: tuple[GraphInterface, ...] = ()

    @property
    def call_order(self) -> tuple[GraphInterface, ...]:
        """Return the graphs in the order in which they are called."""
        encoder = () if self.encoder is None else (self.encoder,)
        return (*encoder, *self.independent, self.main)


class Backend(Protocol):
    """The graphs of one model, opened in a runtime.

    It is created by `(folder, graphs, target, threads, device, dtype)`: the folder of the files, the required
    graphs, the export target (None: not known), the number of CPU threads (None: the runtime's default), the
    requested device, and the precision of the export (None: as in the files), which is used only by backends
    that compute float32 graphs in another one.

    name and version (for example onnxruntime 1.31.1) are part of every score's key, as is the device,
    cpu or cuda. max_tokens_per_call: tokens of a text that one call takes. max_total_tokens: tokens that a
    text may have where its caches grow with every call. Both are None where the runtime sets no limit.
    prefers_stepwise: whether a long prompt is continued faster by single steps than by a graph with the
    generation loop. reduces_logits: whether `step_top` exists and copies less from a GPU than `step`.
    """

    name: str
    version: str
    max_tokens_per_call: int | None
    max_total_tokens: int | None
    prefers_stepwise: bool

    @property
    def reduces_logits(self) -> bool:
        """Return whether the logits of a step can stay on the device."""

    @property
    def generation_graphs(self) -> frozenset[str]:
        """Return those of `ModelGraphs.generation_graphs` that exist."""

    def acquire_graph(self, graph: str) -> AbstractContextManager[bool]:
        """Return whether one of `generation_graphs` can be called within this context; else step graphs are.

        Safe for threads: the graph stays open for the caller until the context ends.

        Raises:
            InputError: the backend is closed, or the graph cannot be opened.
        """

    @property
    def device(self) -> str:
        """Return the device: cpu or cuda."""

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name.

        Raises:
            InputError: the backend is closed.
        """

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> Any:
        """Return the decoding state of `rows` empty rows, for `step` and `reorder_cache` only.

        Args:
            rows: of a batch.
            feeds: inputs of the graph before `main`, which is run now.
            shared: inputs of `main` that are the same in every call.

        Raises:
            InputError: the backend is closed.
        """

    def step(self, held: Any, feeds: Feeds, last: int = 1) -> Logits:
        """Run `main` on `feeds`, update the caches in `held`, return writable float32 logits.

        Args:
            held: changed in place.
            feeds: input_ids, int64 [R, S], and the other inputs of the graph.
            last: number of last tokens whose logits are needed, 0 to S; more may be returned.

        Returns:
            [R, S or fewer, V] of a graph that takes whole prompts, [R, V] of one that takes single tokens.

        Raises:
            InputError: the graph cannot take several tokens for these rows.
            RunError: longer than the engines' size limit, or the device failed.
        """

    def step_top(self, held: Any, feeds: Feeds, count: int) -> TopLogits:
        """Run `main` as `step` does with last = 1; return the `count` highest logits of the last token."""

    def reorder_cache(self, held: Any, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i] (int64 [R]).

        Args:
            held: changed in place.
            rows: any number.
            shared: whether the shared tensors are reordered too. If not, beams have moved within their
                sentences: the number of rows is the same, and shared tensors are unchanged.
        """

    def close(self) -> None:
        """Free the memory and the runtime's threads."""


class NoGenerationGraphs:
    """The part of a `Backend` without graphs of whole generations."""

    generation_graphs: frozenset[str] = frozenset()

    def acquire_graph(self, graph: str) -> AbstractContextManager[bool]:
        """Yield False."""
        return nullcontext(False)


class BackendFactory(Protocol):
    """Creates a `Backend`."""

    def __call__(
        self,
        folder: Path,
        graphs: ModelGraphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> Backend:
        """Open `graphs` in `folder`; see `Backend`.

        Raises:
            InputError: a file is missing or is not such a graph, or the device does not exist.
            MissingDependencyError: the runtime or a part of it is not installed.
        """


def past_input_name(name: str) -> str:
    """Return the input that takes the output `name` in the next call."""
    return PAST_PREFIX + name.removeprefix(PRESENT_PREFIX)


def gather_rows(array: NDArray[Any], rows: Tokens) -> NDArray[Any]:
    """Return `array[rows]`; `take` over two dimensions copies five times as fast as over four."""
    gathered: NDArray[Any] = array.reshape(len(array), -1).take(rows, axis=0)
    return gathered.reshape(len(rows), *array.shape[1:])
