"""Loss terms on inner states of teacher and student: hidden states, attention scores, relations.

- `attention_loss`: mean squared difference of attention scores before the softmax.
- `cosine_loss`: cosine distance of hidden states, token by token.
- `hidden_state_loss`: mean squared error of hidden states or embeddings, token by token.
- `relation_loss`: self-attention relations (MiniLMv2), which are similarities between tokens by queries, keys
  and values.

Shapes: B = batch, S = tokens, D = width, H = heads, Q = queries, K = keys, W = width of all heads together,
R = relation heads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.distill.capture import CapturedTensors, CaptureRequest, block_positions, capture_tensors
from smelt.compress.distill.check_config import cosine_width_error, no_attention_scores_error
from smelt.compress.distill.layer_map import LayerMap, check_layer_map, resolve_layer_map, stack_map
from smelt.compress.distill.settings import INNER_LOSSES, LossWeights
from smelt.core.errors import InputError
from smelt.models.families.layout import Attention, Stack
from smelt.models.families.registry import blocks_of
from smelt.tasks.samples import IGNORE_INDEX, TOKEN_MASK_KEY
from smelt.training.extension import AveragedOver, LossTerm


def attention_loss(student: Tensor, teacher: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared difference over visible keys, heads and queries.

    Jiao et al. 2020, TinyBERT, arXiv:1909.10351, equation 7. task_distill.py sets masked scores (-1e2 and
    below) to 0 in both models and divides by all entries; here each query's sum is divided by the number of
    its visible keys. Without padding the two are equal; this form does not depend on the padded length.

    Args:
        student: float [B, H, Q, K], scaled, with position biases, without the mask.
        teacher: float [B, H, Q, K]; no gradient flows into it.
        visible: bool, broadcastable to [B, 1, Q, K]: which keys a query sees.
        mask: bool [B, Q], false for padded queries.

    Returns:
        float32 scalar.
    """
    squares = (student.float() - teacher.detach().float()).square().mean(dim=1, keepdim=True)
    visible = visible.expand_as(squares)
    per_query = squares.masked_fill(~visible, 0.0).sum(dim=-1) / visible.sum(dim=-1).clamp(min=1)
    return per_query.squeeze(1).masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def cosine_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of 1 - cos(student, teacher) over the tokens where `mask` is true.

    Sanh et al. 2019, DistilBERT, arXiv:1910.01108: CosineEmbeddingLoss with target 1 on the last hidden
    states (distiller.py, alpha_cos).

    Args:
        student: float [B, S, D].
        teacher: float [B, S, D]; no gradient flows into it.
        mask: bool [B, S], false for padding.

    Returns:
        float32 scalar, 0 to 2.
    """
    distance = 1 - F.cosine_similarity(student.float(), teacher.detach().float(), dim=-1)
    return distance.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def hidden_state_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared difference over the width and the tokens where `mask` is true.

    Jiao et al. 2020, TinyBERT, arXiv:1909.10351, equations 8 and 9; task_distill.py also averages over
    padding, which makes the loss depend on the other samples of a batch.

    Args:
        student: float [B, S, D], projected to the teacher's width if they differ.
        teacher: float [B, S, D]; no gradient flows into it.
        mask: bool [B, S], false for padding.

    Returns:
        float32 scalar.
    """
    squares = (student.float() - teacher.detach().float()).square().mean(dim=-1)
    return squares.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def relation_loss(student: Tensor, teacher: Tensor, mask: Tensor, heads: int, causal: bool) -> Tensor:
    """Return KL(teacher's relations || student's), the mean over relation heads and tokens in `mask`.

    Wang et al. 2021, MiniLMv2, arXiv:2012.15828, equations 4 to 7, for one of queries, keys and values: all
    heads are concatenated and split again into R relation heads, and a relation is
    softmax(A A^T / sqrt(W / R)). So widths and numbers of heads may differ.

    Args:
        student: float [B, S, W].
        teacher: float [B, S, another W]; no gradient flows into it.
        mask: bool [B, S]; false for padding, which takes part in no relation.
        heads: R, which divides both widths.
        causal: whether a token is compared only with tokens before it, as in a decoder.

    Returns:
        float32 scalar, nats.
    """
    hidden = ~mask[:, None, None, :]
    if causal:
        size = mask.shape[1]
        future_tokens = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
        hidden = hidden | future_tokens
    student_log_probs = _relation_log_probs(student, heads, hidden)
    teacher_log_probs = _relation_log_probs(teacher.detach(), heads, hidden)
    # hidden entries add nothing
    terms = torch.where(
        hidden,
        0.0,
        teacher_log_probs.exp() * (teacher_log_probs - student_log_probs).masked_fill(hidden, 0.0),
    )
    per_token = terms.sum(dim=-1).mean(dim=1)
    return per_token.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def _relation_log_probs(vectors: Tensor, heads: int, hidden: Tensor) -> Tensor:
    """Return log-probabilities [B, R, S, S] over the tokens that are not hidden."""
    batch, size, width = vectors.shape
    relation_vectors = vectors.float().reshape(batch, size, heads, width // heads).transpose(1, 2)
    with torch.autocast(vectors.device.type, enabled=False):  # otherwise matmul is bfloat16
        scores = relation_vectors @ relation_vectors.transpose(-1, -2) / (width / heads) ** 0.5
    # finite, so that a row of padding only has no NaN gradient
    log_probs: Tensor = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).log_softmax(dim=-1)
    return log_probs


PROJECTION_KEY = "projection"


@dataclass(frozen=True)
class StackPairs:
    """The layer map of one stack: student state to teacher state, and the blocks among them."""

    stack: Stack
    states: Mapping[int, int]
    averaged_over: AveragedOver

    @property
    def blocks(self) -> dict[int, int]:
        """The mapped blocks, without the embeddings."""
        return {
            student_state: teacher_state
            for student_state, teacher_state in self.states.items()
            if student_state and teacher_state
        }

    @property
    def embeddings(self) -> dict[int, int]:
        """The student's embeddings (0) and the teacher's state that they are mapped to."""
        return {
            student_state: teacher_state
            for student_state, teacher_state in self.states.items()
            if not student_state
        }

    @property
    def last_block(self) -> dict[int, int]:
        """The last of the student's mapped blocks."""
        return dict(list(self.blocks.items())[-1:])


def stack_pairs(student: Any, teacher: Any, layer_map: LayerMap) -> list[StackPairs]:
    """Return which states of the two models are compared, stack by stack."""
    counts: list[dict[str, int]] = [
        {b.stack.name: len(b.stack.modules(model)) for b in blocks_of(model)} for model in (student, teacher)
    ]
    stacks = {block.stack.name: block.stack for block in blocks_of(student)}
    pairs = []
    for name, stack in stacks.items():
        states = resolve_layer_map(stack_map(layer_map, name), counts[0][name], counts[1][name])
        pairs.append(StackPairs(stack, states, "labels" if stack.causal else "inputs"))
    return pairs


class InnerLosses:
    """Captures tensors of a student and its teacher during the forward pass and compares them."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        weights: LossWeights,
        layer_map: LayerMap,
        relation_heads: int | None = None,
        seed: int = 0,
        *,
        mean_over_layers: bool = False,
    ) -> None:
        """Prepare both models; states of different widths get a projection (initialized with `seed`).

        mean_over_layers: hidden-state and attention losses are divided by the number of mapped layers. Jiao
        et al. 2020, TinyBERT, add them (equation 11; task_distill.py), so that their weight relative to other
        terms grows with the student's depth.

        Raises:
            InputError: the two models do not have what the losses compare.
        """
        self.weights, self.relation_heads = weights, relation_heads
        self.mean_over_layers = mean_over_layers
        self.student, self.teacher = student, teacher
        for error in check_layer_map(layer_map, student.config.to_dict(), teacher.config.to_dict()):
            raise InputError(f"distill: layer_map: {error.message}", code=error.code, setting=error.setting)
        self.pairs = stack_pairs(student, teacher, layer_map)
        self.ours, self.theirs = CapturedTensors(), CapturedTensors()
        self.widths = tuple(_hidden_size(model) for model in (student, teacher))
        self.modules: dict[str, nn.Module] = {}
        if (weights.hidden_states or weights.input_embeddings) and self.widths[0] != self.widths[1]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.modules[PROJECTION_KEY] = nn.Linear(self.widths[0], self.widths[1], bias=False)
        self._require_comparable()

    def _require_comparable(self) -> None:
        student_width, teacher_width = self.widths
        if self.weights.cosine and student_width != teacher_width:
            raise InputError(
                f"distill: {cosine_width_error(student_width, teacher_width)}",
                code="width-mismatch",
                setting="losses.cosine",
            )
        for pair in self.pairs:
            for name, blocks in (("attention", pair.blocks), ("self_attention_relations", pair.last_block)):
                if getattr(self.weights, name):
                    _require_attentions(self.student, self.teacher, pair.stack, blocks, name)
        if self.weights.attention:
            for pair in self.pairs:
                _require_heads(self.student, self.teacher, pair)
        for pair in self.pairs:
            if not pair.blocks and (self.weights.attention or self.weights.self_attention_relations):
                raise InputError(
                    f"distill: layer_map maps no layer of {pair.stack.name}, only its embeddings (0),"
                    " but the losses attention and self_attention_relations compare layers. Map"
                    " at least one layer.",
                    code="no-layer-mapped",
                    setting="layer_map",
                )

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture tensors of both models inside the context; LayerDrop of the student is disabled."""
        with (
            _layerdrop_disabled(self.student),
            capture_tensors(self.student, self._capture_request(True), self.ours),
            capture_tensors(self.teacher, self._capture_request(False), self.theirs),
        ):
            yield

    def clear(self) -> None:
        """Clear the tensors of the last batch."""
        self.ours.clear()
        self.theirs.clear()

    def _capture_request(self, student: bool) -> CaptureRequest:
        """Return what to capture of the student, or of the teacher."""
        w = self.weights
        requested: dict[str, set[tuple[str, int]]] = {"states": set(), "scores": set(), "projections": set()}
        for pair in self.pairs:
            for kind, weight, mapped in (
                ("states", w.hidden_states, pair.blocks),
                ("states", w.input_embeddings, pair.embeddings),
                ("states", w.cosine, pair.last_block),
                ("scores", w.attention, pair.blocks),
                ("projections", w.self_attention_relations, pair.last_block),
            ):
                if weight:
                    indices = mapped.keys() if student else mapped.values()
                    requested[kind] |= {(pair.stack.name, index) for index in indices}
        return CaptureRequest(**{kind: frozenset(keys) for kind, keys in requested.items()})

    def loss_terms(self, batch: Mapping[str, Tensor]) -> dict[str, LossTerm]:
        """Return the weighted loss terms by name; those of a decoder are means over labels.

        Args:
            batch: the batch that both models have just processed.
        """
        terms: dict[str, LossTerm] = {}
        for pair in self.pairs:
            mask = self._token_mask(pair, batch)
            for name in INNER_LOSSES:
                weight = getattr(self.weights, name)
                if weight:
                    label = name if len(self.pairs) == 1 else f"{name}.{pair.stack.name}"
                    value: Tensor = getattr(self, f"_{name}")(pair, mask)
                    terms[label] = LossTerm(weight * value, pair.averaged_over)
        return terms

    def _token_mask(self, pair: StackPairs, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which tokens are compared, bool [B, L]: those of the texts, or all patches of images."""
        if pair.averaged_over != "inputs":
            return batch["labels"] != IGNORE_INDEX
        token_mask = batch.get(TOKEN_MASK_KEY, batch.get("attention_mask"))
        if token_mask is not None:
            return token_mask.bool()
        student_tensors = self.ours
        captured = [
            *student_tensors.states.values(),
            *(projections["query"] for projections in student_tensors.projections.values()),
        ]
        captured += [
            scores.scores[:, 0] for block_scores in student_tensors.scores.values() for scores in block_scores
        ]
        return torch.ones(captured[0].shape[:2], dtype=torch.bool, device=captured[0].device)

    def _hidden_states(self, pair: StackPairs, mask: Tensor) -> Tensor:
        return self._states_distance(pair.stack.name, pair.blocks, mask) / self._layer_divisor(pair)

    def _layer_divisor(self, pair: StackPairs) -> int:
        return len(pair.blocks) if self.mean_over_layers else 1

    def _input_embeddings(self, pair: StackPairs, mask: Tensor) -> Tensor:
        return self._states_distance(pair.stack.name, pair.embeddings, mask)

    def _states_distance(self, stack: str, states: Mapping[int, int], mask: Tensor) -> Tensor:
        project = self.modules.get(PROJECTION_KEY, nn.Identity())
        return _sum_tensors(
            hidden_state_loss(project(self.ours.states[stack, a]), self.theirs.states[stack, b], mask)
            for a, b in states.items()
        )

    def _cosine(self, pair: StackPairs, mask: Tensor) -> Tensor:
        name = pair.stack.name
        return _sum_tensors(
            cosine_loss(self.ours.states[name, a], self.theirs.states[name, b], mask)
            for a, b in pair.last_block.items()
        )

    def _attention(self, pair: StackPairs, mask: Tensor) -> Tensor:
        name, parts = pair.stack.name, []
        for student_block, teacher_block in pair.blocks.items():
            for student_scores, teacher_scores in zip(
                self.ours.scores[name, student_block], self.theirs.scores[name, teacher_block], strict=True
            ):
                parts.append(
                    attention_loss(student_scores.scores, teacher_scores.scores, student_scores.visible, mask)
                )
        return _sum_tensors(parts) / self._layer_divisor(pair)

    def _self_attention_relations(self, pair: StackPairs, mask: Tensor) -> Tensor:
        name, parts = pair.stack.name, []
        for student_block, teacher_block in pair.last_block.items():
            student_vectors, teacher_vectors = (
                self.ours.projections[name, student_block],
                self.theirs.projections[name, teacher_block],
            )
            for kind in ("query", "key", "value"):
                heads = self._relation_heads(
                    pair, teacher_block, student_vectors[kind].shape[-1], teacher_vectors[kind].shape[-1]
                )
                parts.append(
                    relation_loss(
                        student_vectors[kind], teacher_vectors[kind], mask, heads, pair.stack.causal
                    )
                )
        return _sum_tensors(parts)

    def _relation_heads(self, pair: StackPairs, block: int, ours: int, theirs: int) -> int:
        """Return the number of relation heads: the teacher's number of heads if it divides both widths."""
        if self.relation_heads is None:
            attentions = _attentions(self.teacher, pair.stack.name, block)
            self_attention = next(attention for attention in attentions if not attention.cross)
            return math.gcd(_num_heads(self.teacher, self_attention), ours, theirs)
        if ours % self.relation_heads or theirs % self.relation_heads:
            raise InputError(
                f"distill: relation_heads: {self.relation_heads} does not divide the widths {ours} (student)"
                f" and {theirs} (teacher) of {pair.stack.name}; use {math.gcd(ours, theirs)} or one of its"
                " divisors.",
                code="heads-do-not-divide",
                setting="relation_heads",
            )
        return self.relation_heads


@contextlib.contextmanager
def _layerdrop_disabled(model: nn.Module) -> Iterator[None]:
    """Disable LayerDrop (Fan et al. 2020) of `model` inside the context.

    A dropped layer has no states to compare. transformers stores the rate in each stack (0.05 for M2M100).
    """
    stacks: list[Any] = [module for module in model.modules() if "layerdrop" in vars(module)]
    rates = [stack.layerdrop for stack in stacks]
    try:
        for stack in stacks:
            stack.layerdrop = 0.0
        yield
    finally:
        for stack, rate in zip(stacks, rates, strict=True):
            stack.layerdrop = rate


def _sum_tensors(values: Any) -> Tensor:
    tensors = list(values)
    total: Tensor = tensors[0]
    for value in tensors[1:]:
        total = total + value
    return total


def _hidden_size(model: Any) -> int:
    """Return the width of the hidden states; of a model of images that of its last norm."""
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "embedding_dim"):
        return int(embedding.embedding_dim)
    norm: Any = model.get_submodule(blocks_of(model)[0].stack.stream.final_norm)
    return len(norm.weight)


def _attentions(model: Any, stack: str, number: int) -> tuple[Attention, ...]:
    """Return the attentions of block `number`, counted from 1."""
    for block in blocks_of(model):
        if block.stack.name == stack and number in block_positions(block):
            return block.attentions
    raise KeyError(f"{stack} {number}")


def _num_heads(model: Any, attention: Attention) -> int:
    """Return the number of query heads of an attention."""
    width = int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
    return int(model.get_submodule(attention.out).in_features) // width


def _require_attentions(
    student: Any, teacher: Any, stack: Stack, blocks: Mapping[int, int], loss: str
) -> None:
    """Require that the compared blocks have their attentions: `drop-layers` may have removed some.

    Raises:
        InputError: an attention is missing.
    """
    for role, model, indices in (("student", student, blocks.keys()), ("teacher", teacher, blocks.values())):
        for index in indices:
            attentions = _attentions(model, stack.name, index)
            if len(attentions) < len(stack.attentions if loss == "attention" else stack.attentions[:1]) or (
                attentions[0].cross
            ):
                raise InputError(
                    f"distill: layer {index} of the {role} ({stack.name}) has no attention, but"
                    f" losses: {{{loss}: ...}} compares attentions. Map only layers with attention"
                    f" in layer_map, or use losses: {{hidden_states: 1.0}}.",
                    code="attention-removed",
                    setting=f"losses.{loss}",
                )


def _require_heads(student: Any, teacher: Any, pair: StackPairs) -> None:
    """Require that attention scores can be compared head by head.

    Raises:
        InputError: numbers of heads differ, or scores cannot be captured.
    """
    name = pair.stack.name
    for a, b in pair.blocks.items():
        num_heads = []
        for model, index in ((student, a), (teacher, b)):
            attentions = _attentions(model, name, index)
            if not all(attention.uses_attention_interface for attention in attentions):
                raise InputError(
                    f"distill: {no_attention_scores_error(model.config.model_type)}",
                    code="unreadable-attention",
                    setting="losses.attention",
                )
            num_heads.append([_num_heads(model, attention) for attention in attentions])
        if num_heads[0] != num_heads[1]:
            heads_a, heads_b = (" and ".join(map(str, dict.fromkeys(heads))) for heads in num_heads)
            raise InputError(
                f"distill: layer {a} of the student ({name}) has {heads_a} attention heads, but layer {b}"
                f" of the teacher has {heads_b}; the loss attention compares head by head. Use"
                f" losses: {{self_attention_relations: 1.0}}, which works with different"
                " numbers of heads.",
                code="heads-mismatch",
                setting="losses.attention",
            )
