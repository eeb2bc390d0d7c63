"""The parts of a loss that look inside teacher and student: states, attention scores, relations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.distill.fit import no_angle, no_scores
from smelt.compress.distill.layer_map import LayerMap, check_map, of_stack, resolve
from smelt.compress.distill.losses.attention import attention_loss
from smelt.compress.distill.losses.cosine import cosine_loss
from smelt.compress.distill.losses.hidden import hidden_loss
from smelt.compress.distill.losses.relations import relation_loss
from smelt.compress.distill.reading import Read, Wanted, places_of, reading
from smelt.compress.distill.weights import INNER, LossWeights
from smelt.compress.train.losses.of_tokens import IGNORE
from smelt.compress.train.terms import Over, Term
from smelt.core.errors import InputError
from smelt.families.family import Attention, Stack
from smelt.families.walk import blocks_of

PROJECTION = "projection"


@dataclass(frozen=True)
class Pairs:
    """Of one stack, which state of the student goes with which of the teacher, and the blocks among them."""

    stack: Stack
    states: Mapping[int, int]
    over: Over

    @property
    def blocks(self) -> dict[int, int]:
        """Those that are no embeddings."""
        return {ours: theirs for ours, theirs in self.states.items() if ours and theirs}

    @property
    def embeddings(self) -> dict[int, int]:
        """The student's embeddings, and what they go with."""
        return {ours: theirs for ours, theirs in self.states.items() if not ours}

    @property
    def last(self) -> dict[int, int]:
        """The last of the student's blocks."""
        return dict(list(self.blocks.items())[-1:])


def pairs_of(student: Any, teacher: Any, layer_map: LayerMap) -> list[Pairs]:
    """Return which states of the two models are compared, stack by stack."""
    counts: list[dict[str, int]] = [_counts(model) for model in (student, teacher)]
    stacks = {block.stack.name: block.stack for block in blocks_of(student)}
    found = []
    for name, stack in stacks.items():
        states = resolve(of_stack(layer_map, name), counts[0][name], counts[1][name])
        found.append(Pairs(stack, states, "labels" if stack.causal else "inputs"))
    return found


def _counts(model: Any) -> dict[str, int]:
    return {b.stack.name: len(model.get_submodule(b.stack.place)) for b in blocks_of(model)}


class Inner:
    """Reads a student and its teacher while they compute, and compares what was read."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        weights: LossWeights,
        layer_map: LayerMap,
        relation_heads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Look at both models; where states have another width, draw a projection (by `seed`).

        Raises:
            InputError: the loss asks for what the two do not have in common.
        """
        self.weights, self.relation_heads = weights, relation_heads
        self.student, self.teacher = student, teacher
        for one in check_map(layer_map, student.config.to_dict(), teacher.config.to_dict()):
            raise InputError(f"distill: layer_map: {one.message}", code=one.code, setting=one.setting)
        self.pairs = pairs_of(student, teacher, layer_map)
        self.ours, self.theirs = Read(), Read()
        self.widths = tuple(_width(model) for model in (student, teacher))
        self.modules: dict[str, nn.Module] = {}
        if (weights.hidden_states or weights.input_embeddings) and self.widths[0] != self.widths[1]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.modules[PROJECTION] = nn.Linear(self.widths[0], self.widths[1], bias=False)
        self._require_fit()

    def _require_fit(self) -> None:
        ours, theirs = self.widths
        if self.weights.cosine and ours != theirs:
            raise InputError(
                f"distill: {no_angle(ours, theirs)}", code="width-mismatch", setting="losses.cosine"
            )
        for pair in self.pairs:
            for name, blocks in (("attention", pair.blocks), ("self_attention_relations", pair.last)):
                if getattr(self.weights, name):
                    _require_attentions(self.student, self.teacher, pair.stack, blocks, name)
        if self.weights.attention:
            for pair in self.pairs:
                _require_heads(self.student, self.teacher, pair)
        for pair in self.pairs:
            if not pair.blocks and (self.weights.attention or self.weights.self_attention_relations):
                raise InputError(
                    f"distill: layer_map names no layer of {pair.stack.name}, only its embeddings (0);"
                    " attention and relations compare layers.",
                    code="no-layer-mapped",
                    setting="layer_map",
                )

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Read both models meanwhile; the student computes all of its layers."""
        with (
            _all_layers(self.student),
            reading(self.student, self._wanted(True), self.ours),
            reading(self.teacher, self._wanted(False), self.theirs),
        ):
            yield

    def clear(self) -> None:
        """Forget the last batch."""
        self.ours.clear()
        self.theirs.clear()

    def _wanted(self, student: bool) -> Wanted:
        """Return what is read of the student, or of the teacher."""
        w = self.weights
        chosen: dict[str, set[tuple[str, int]]] = {"states": set(), "scores": set(), "products": set()}
        for pair in self.pairs:
            for kind, weight, of in (
                ("states", w.hidden_states, pair.blocks),
                ("states", w.input_embeddings, pair.embeddings),
                ("states", w.cosine, pair.last),
                ("scores", w.attention, pair.blocks),
                ("products", w.self_attention_relations, pair.last),
            ):
                if weight:
                    numbers = of.keys() if student else of.values()
                    chosen[kind] |= {(pair.stack.name, number) for number in numbers}
        return Wanted(**{kind: frozenset(places) for kind, places in chosen.items()})

    def terms(self, batch: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return the weighted parts of the loss by name; those of a decoder are means over labels.

        Args:
            batch: what both models have just been run on.
        """
        found: dict[str, Term] = {}
        for pair in self.pairs:
            there = batch["attention_mask"].bool() if pair.over == "inputs" else batch["labels"] != IGNORE
            for name in INNER:
                weight = getattr(self.weights, name)
                if weight:
                    label = name if len(self.pairs) == 1 else f"{name}.{pair.stack.name}"
                    value: Tensor = getattr(self, f"_{name}")(pair, there)
                    found[label] = Term(weight * value, pair.over)
        return found

    def _hidden_states(self, pair: Pairs, there: Tensor) -> Tensor:
        return self._apart(pair.stack.name, pair.blocks, there)

    def _input_embeddings(self, pair: Pairs, there: Tensor) -> Tensor:
        return self._apart(pair.stack.name, pair.embeddings, there)

    def _apart(self, stack: str, states: Mapping[int, int], there: Tensor) -> Tensor:
        project = self.modules.get(PROJECTION, nn.Identity())
        return _sum(
            hidden_loss(project(self.ours.states[stack, a]), self.theirs.states[stack, b], there)
            for a, b in states.items()
        )

    def _cosine(self, pair: Pairs, there: Tensor) -> Tensor:
        name = pair.stack.name
        return _sum(
            cosine_loss(self.ours.states[name, a], self.theirs.states[name, b], there)
            for a, b in pair.last.items()
        )

    def _attention(self, pair: Pairs, there: Tensor) -> Tensor:
        name, parts = pair.stack.name, []
        for a, b in pair.blocks.items():
            for ours, theirs in zip(self.ours.scores[name, a], self.theirs.scores[name, b], strict=True):
                parts.append(attention_loss(ours.scores, theirs.scores, ours.seen, there))
        return _sum(parts)

    def _self_attention_relations(self, pair: Pairs, there: Tensor) -> Tensor:
        name, parts = pair.stack.name, []
        for a, b in pair.last.items():
            ours, theirs = self.ours.products[name, a], self.theirs.products[name, b]
            for word in ("query", "key", "value"):
                heads = self._relation_heads(pair, b, ours[word].shape[-1], theirs[word].shape[-1])
                parts.append(relation_loss(ours[word], theirs[word], there, heads, pair.stack.causal))
        return _sum(parts)

    def _relation_heads(self, pair: Pairs, block: int, ours: int, theirs: int) -> int:
        """Return how many relation heads there are: as many as the teacher has heads, where that divides."""
        if self.relation_heads is None:
            attentions = _attentions(self.teacher, pair.stack.name, block)
            own = next(attention for attention in attentions if not attention.cross)
            return math.gcd(_heads(self.teacher, own), ours, theirs)
        if ours % self.relation_heads or theirs % self.relation_heads:
            raise InputError(
                f"distill: relation_heads: {self.relation_heads} does not divide the widths {ours} (student)"
                f" and {theirs} (teacher) of {pair.stack.name}; {math.gcd(ours, theirs)} and its divisors"
                " do.",
                code="heads-do-not-divide",
                setting="relation_heads",
            )
        return self.relation_heads


@contextlib.contextmanager
def _all_layers(model: nn.Module) -> Iterator[None]:
    """Keep `model` from leaving layers out at random while it trains (LayerDrop, Fan et al. 2020).

    Of a layer that was left out there is nothing to compare. transformers keeps the rate, of M2M100 0.05, in
    each stack.
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


def _sum(values: Any) -> Tensor:
    found = list(values)
    total: Tensor = found[0]
    for value in found[1:]:
        total = total + value
    return total


def _width(model: Any) -> int:
    return int(model.get_input_embeddings().embedding_dim)


def _attentions(model: Any, stack: str, number: int) -> tuple[Attention, ...]:
    """Return the attentions of the block in place `number`, from 1."""
    for block in blocks_of(model):
        if block.stack.name == stack and number in places_of(block):
            return block.attentions
    raise KeyError(f"{stack} {number}")


def _heads(model: Any, attention: Attention) -> int:
    """Return how many heads of queries an attention has."""
    width = int(getattr(model.get_submodule(attention.name), attention.width))
    return int(model.get_submodule(attention.out).in_features) // width


def _require_attentions(
    student: Any, teacher: Any, stack: Stack, blocks: Mapping[int, int], loss: str
) -> None:
    """Require that the blocks that are compared attend: `drop-layers` may have taken that out of some.

    Raises:
        InputError: one does not.
    """
    for who, model, numbers in (("student", student, blocks.keys()), ("teacher", teacher, blocks.values())):
        for number in numbers:
            there = _attentions(model, stack.name, number)
            if len(there) < len(stack.attentions if loss == "attention" else stack.attentions[:1]) or (
                there[0].cross
            ):
                raise InputError(
                    f"distill: layer {number} of the {who} ({stack.name}) has lost an attention, which"
                    f" losses: {{{loss}: ...}} compares. Name layers that have theirs in layer_map, or take"
                    " losses: {hidden_states: 1.0}.",
                    code="attention-removed",
                    setting=f"losses.{loss}",
                )


def _require_heads(student: Any, teacher: Any, pair: Pairs) -> None:
    """Require that scores can be compared head by head.

    Raises:
        InputError: a layer has another number of heads, or its scores cannot be read.
    """
    name = pair.stack.name
    for a, b in pair.blocks.items():
        found = []
        for model, number in ((student, a), (teacher, b)):
            attentions = _attentions(model, name, number)
            if not all(attention.interface for attention in attentions):
                raise InputError(
                    f"distill: {no_scores(model.config.model_type)}",
                    code="unreadable-attention",
                    setting="losses.attention",
                )
            found.append([_heads(model, attention) for attention in attentions])
        if found[0] != found[1]:
            ours, theirs = (" and ".join(map(str, dict.fromkeys(heads))) for heads in found)
            raise InputError(
                f"distill: layer {a} of the student ({name}) has {ours} attention heads, layer {b} of the"
                f" teacher {theirs}; scores are compared head by head. Take losses:"
                f" {{self_attention_relations: 1.0}}, which"
                " does not need equal heads, instead of attention.",
                code="heads-mismatch",
                setting="losses.attention",
            )
