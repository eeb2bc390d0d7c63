"""The supported families, by the config's model_type, and the parts of a loaded model by its family.

A new family is a file and a line here. The parts are blocks, norms with their consumers, and shared inputs.
Blocks, attentions and feed-forward parts are listed once each. Nothing here imports torch: submodules are
looked up by name.

`norm_consumers` returns the linear layers that use the output of a norm. Methods need them that fold a scale
into a norm and its inverse into its consumers (SmoothQuant, AWQ), or that need the scale of a linear layer's
inputs. `shared_inputs` returns the linear layers that share an input, and the linear layer that computes it,
if nothing else uses it. A scale for each channel can be moved from the columns of the consumers into the rows
of this producer, without cost at run time; AWQ uses this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from smelt.data.tasks import TASKS, Task
from smelt.models.families import (
    albert,
    bart,
    bert,
    clip,
    convnext,
    convnextv2,
    deberta_v2,
    dinov2,
    distilbert,
    efficientnet,
    electra,
    gemma,
    gemma3_text,
    gpt2,
    gpt_neox,
    granite,
    llama,
    m2m_100,
    marian,
    mbart,
    mistral,
    mixtral,
    mobilenet_v2,
    modernbert,
    mpnet,
    mt5,
    opt,
    pegasus,
    phi,
    phi3,
    qwen2,
    qwen3,
    resnet,
    roberta,
    siglip,
    smollm3,
    starcoder2,
    t5,
    torch_module,
    vit,
    whisper,
    xlm_roberta,
)
from smelt.models.families.config_keys import config_value
from smelt.models.families.family import Family
from smelt.models.families.layout import Attention, Config, FeedForward, Stack

_SEQ2SEQ_MODULES = (marian, t5, mt5, bart, mbart, pegasus, m2m_100)
_AUDIO_MODULES = (whisper,)
_ENCODER_MODULES = (bert, distilbert, roberta, xlm_roberta, mpnet, modernbert, electra, albert, deberta_v2)
_IMAGE_MODULES = (vit, dinov2, resnet, convnext, convnextv2, mobilenet_v2, efficientnet)
_IMAGE_TEXT_MODULES = (clip, siglip)
_LLAMA_MODULES = (llama, mistral, mixtral, qwen2, qwen3, gemma, gemma3_text, phi3, granite, smollm3)
_DECODER_MODULES = (gpt2, opt, gpt_neox, phi, *_LLAMA_MODULES, starcoder2)
FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        *_SEQ2SEQ_MODULES,
        *_AUDIO_MODULES,
        *_ENCODER_MODULES,
        *_DECODER_MODULES,
        *_IMAGE_MODULES,
        *_IMAGE_TEXT_MODULES,
    )
}
# The names of the families for each task.
FAMILIES_BY_TASK: dict[Task, tuple[str, ...]] = {
    task: tuple(name for name, family in FAMILIES.items() if task in family.tasks) for task in TASKS
}


# Set by a plan in the config of a model whose convolutions will be quantized.
QUANTIZED_CONVOLUTIONS_KEY = "smelt_coded_convolutions"


def find_family(config: Config) -> Family | None:
    """Return the family of a Hugging Face config, None if it is not supported."""
    return _family_by_type(str(config.get("model_type")))


def family_of(model: Any) -> Family | None:
    """Return the family of a transformers model, None if it is not supported."""
    return _family_by_type(getattr(getattr(model, "config", None), "model_type", ""))


def decoder_logits(model: Any, hidden: Any) -> Any:
    """Return the logits, a float tensor [..., V], of the last hidden states [..., D] of a decoder."""
    logits, family = model.get_output_embeddings()(hidden), family_of(model)
    divisor = 1.0 if family is None else family.logits_divisor(model.config.to_dict())
    return logits if divisor == 1 else logits / divisor


def _family_by_type(model_type: str) -> Family | None:
    return torch_module.MODULE_FAMILIES.get(model_type) or FAMILIES.get(model_type)


def is_user_module(config: Config) -> bool:
    """Return whether the model of a config is a PyTorch module of the user's own."""
    family = find_family(config)
    return family is not None and family.is_user_module


def reads_images(config: Config) -> bool:
    """Return whether the model of a Hugging Face config takes images instead of texts."""
    family = find_family(config)
    return family is not None and family.input_kind == "images"


def reads_images_and_texts(config: Config) -> bool:
    """Return whether the model of a config takes images and texts, each in a tower of its own."""
    family = find_family(config)
    return family is not None and family.input_kind == "images-and-texts"


def reads_audio(config: Config) -> bool:
    """Return whether the model of a config takes spectrograms of audio."""
    family = find_family(config)
    return family is not None and family.input_kind == "audio"


def encoder_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a model's inputs that its encoder reads."""
    names = ("input_ids", "attention_mask", "input_features")
    return {name: inputs[name] for name in names if name in inputs}


def reads_arrays(config: Config) -> bool:
    """Return whether the model of a config takes arrays by name."""
    family = find_family(config)
    return family is not None and family.input_kind == "arrays"


def lacks_head(config: Config) -> bool:
    """Return whether `config` (config.json) is that of an encoder and a decoder without an output layer."""
    names = [str(name) for name in config.get("architectures") or ()]
    # MarianMTModel has an output layer despite its name
    is_base_model = bool(names) and names[0].endswith("Model") and not names[0].endswith("MTModel")
    return is_base_model and bool(config.get("is_encoder_decoder"))


# The attribute of a block with its removed parts.
SKIPPED_PARTS_ATTRIBUTE = "smelt_skipped"


@dataclass(frozen=True)
class Block:
    """One block of a model.

    index: its position in the stack. module_path: its dotted name. window: its attention window (see
    `Family.window`), None for all. call_indices: all positions at which the stack calls the module.
    """

    stack: Stack
    index: int
    module_path: str
    module: Any
    window: int | None = None
    call_indices: tuple[int, ...] = ()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attentions, without removed ones, with their full names in the model."""
        removed_parts = skipped_parts(self.module)
        all_of_them = enumerate(self.stack.attentions)
        return tuple(
            attention.with_prefix(self.module_path)
            for index, attention in all_of_them
            if index not in removed_parts
        )

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """Its feed-forward part, with its full names in the model, or its experts; none if it was removed."""
        if len(self.stack.attentions) in skipped_parts(self.module):
            return ()
        part = self.stack.feed_forward
        number = 1 if part.experts is None else len(self.module.get_submodule(part.experts))
        return tuple(part.expert(index).with_prefix(self.module_path) for index in range(number))

    @property
    def parts(self) -> tuple[Attention | FeedForward, ...]:
        """Its attentions and feed-forward part or experts, in order, without removed ones."""
        return (*self.attentions, *self.feed_forwards)


def skipped_parts(block: Any) -> frozenset[int]:
    """Return the removed parts of a block: attentions are numbered in order, then the feed-forward part."""
    parts: frozenset[int] = getattr(block, SKIPPED_PARTS_ATTRIBUTE, frozenset())
    return parts


def blocks_of(model: Any) -> list[Block]:
    """Return the blocks of `model`, stack by stack; a repeated block counts once.

    A model of an unsupported family has none.
    """
    family = family_of(model)
    if family is None:
        return []
    config = model.config.to_dict()
    return [block for stack in family.stacks(config) for block in _stack_blocks(model, family, stack, config)]


def is_token_embedding(family: Family, config: Config, name: str) -> bool:
    """Return whether a tensor has the name of the family's token embedding, outside of all blocks.

    Inside of them `shared` is the matrix shared by linear layers (smelt/models/layers.py).
    """
    block_prefixes = tuple(f"{stack.module_path}." for stack in family.stacks(config))
    return name.endswith(family.embedding_suffixes) and not name.startswith(block_prefixes)


def model_attentions(model: Any) -> list[Attention]:
    """Return the attentions of `model` in order, with their full names."""
    return [attention for block in blocks_of(model) for attention in block.attentions]


def token_lookup_modules(model: Any) -> list[Any]:
    """Return the modules that look up token ids, of any type."""
    family = family_of(model)
    if family is not None and family.towers:
        tables = [
            table for stack in family.stacks(model.config.to_dict()) for table in stack.stream.embeddings
        ]
        return [model.get_submodule(table.rpartition(".")[0]) for table in tables[:1]]
    modules = [model.get_input_embeddings()]
    if model.config.is_encoder_decoder:
        modules += [model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()]
    return modules


def predicts_tokens(model: Any) -> bool:
    """Return whether the logits of a transformers model are those of tokens of its vocabulary."""
    output_embeddings = getattr(model, "get_output_embeddings", None)
    return output_embeddings is not None and output_embeddings() is not None


def output_modules(model: Any) -> tuple[str, ...]:
    """Return the modules between the last hidden states and the outputs of `model`; none without a head.

    See `Family.head_modules`. Another head may be one layer, as that of a token classifier. A model of an
    unsupported family, or one that predicts tokens, has none.
    """
    family = family_of(model)
    names = {name for name, _ in model.named_modules()}
    if family is None or names.issuperset(family.head_modules):
        return () if family is None else family.head_modules
    children = () if predicts_tokens(model) else model.named_children()
    layers = [
        name for name, child in children if name != model.base_model_prefix and hasattr(child, "in_features")
    ]
    return tuple(layers) if len(layers) == 1 else ()


@dataclass(frozen=True)
class HiddenStateLocation:
    """Hidden states that a forward hook on a module can capture.

    stack: the name of the stack. index: 0 for the input of its first block, the embeddings; n for the output
    of its n-th block. module_path: the block's name. A repeated block computes several of them, one per
    call, under its first name.
    """

    stack: str
    index: int
    module_path: str

    def extract(self, inputs: tuple[Any, ...], result: Any) -> Any:
        """Return the states, float [B, S, D], from the hook's arguments: positional inputs and output."""
        value = result if self.index else inputs
        return value[0] if isinstance(value, tuple) else value


def hidden_state_locations(model: Any) -> list[HiddenStateLocation]:
    """Return the locations of the hidden states of `model`, stack by stack, in order.

    They are the `hidden_states` of transformers, except for the last, to which it applies the stack's
    final norm (`ResidualStream.final_norm`). A model of an unsupported family has none.
    """
    locations: list[HiddenStateLocation] = []
    for block in blocks_of(model):
        if block.index == 0:
            locations.append(HiddenStateLocation(block.stack.name, 0, block.module_path))
        locations += [
            HiddenStateLocation(block.stack.name, number + 1, block.module_path)
            for number in block.call_indices
        ]
    order = {stack: index for index, stack in enumerate(dict.fromkeys(state.stack for state in locations))}
    return sorted(locations, key=lambda state: (order[state.stack], state.index))


def _stack_blocks(model: Any, family: Family, stack: Stack, config: Config) -> Iterator[Block]:
    indices: dict[Any, list[int]] = {}
    for index, module in enumerate(stack.modules(model)):
        indices.setdefault(module, []).append(index)
    for module, calls in indices.items():
        path, window = f"{stack.module_path}.{calls[0]}", family.window(config, calls[0])
        yield Block(stack, calls[0], path, module, window, tuple(calls))


@dataclass(frozen=True)
class NormConsumers:
    """A norm and its consumers.

    norm: its dotted name. consumers: the linear layers that use its output, directly or times a number. only:
    nothing else uses it, neither the next sum of a post-norm block nor a caller. is_foldable: dividing the
    output of the norm by a number for each channel, and multiplying the columns of the consumers by it, does
    not change the outputs of the model: there are consumers and no other uses, and their weights are not
    shared (a token embedding that is the output layer, a layer that blocks share).
    """

    norm: str
    consumers: tuple[str, ...]
    is_exclusive: bool
    is_foldable: bool


def norm_consumers(model: Any) -> list[NormConsumers]:
    """Return every norm of `model` once, in order of computation.

    A model of an unsupported family has none. Norms of a head's queries and keys have no consumers: their
    outputs are used by the scores.
    """
    family = family_of(model)
    if family is None:
        return []
    collector = _NormCollector(model)
    stacks = family.stacks(model.config.to_dict())
    cross_layers = [
        layer
        for stack in stacks
        for block in _block_paths(model, stack)
        for part, attention in enumerate(stack.attentions)
        if attention.cross and part not in skipped_parts(model.get_submodule(block))
        for layer in _join_paths(block, (attention.key, attention.value))
    ]
    head = list(output_modules(model))
    head_readers = head[:1] if family.head_input_vectors == 1 else []
    for number, stack in enumerate(stacks):
        last = number == len(stacks) - 1
        _collect_stack(collector, stack, head_readers if last else cross_layers)
    for norm, reader in pairwise(head):
        if has_norm_at(collector.model, norm):
            collector.add(norm, [reader], only=True)
    return collector.results()


def hidden_norm_names(model: Any) -> list[str]:
    """Return the norms as wide as the hidden states of `model`, those of its head included, in order.

    Norms of a head's queries and keys, and of embeddings before their projection, are not.
    """
    family = family_of(model)
    stacks = family.stacks(model.config.to_dict()) if family else ()
    excluded = {norm for attention in model_attentions(model) for norm in attention.qk_norms or ()}
    excluded |= {str(s.stream.embedding_norm) for s in stacks if s.stream.embedding_projection}
    return [feed.norm for feed in norm_consumers(model) if feed.norm not in excluded]


def _collect_stack(collector: _NormCollector, stack: Stack, end: list[str]) -> None:
    """Follow the hidden states of one stack; `end` uses its output, empty if that is unknown."""
    stream, source = stack.stream, stack.stream.embedding_norm
    if stream.distance_norm:  # its output is a second input of the layers of queries and keys
        readers = [
            layer
            for block in _block_paths(collector.model, stack)
            for part, attention in enumerate(stack.attentions)
            if part not in skipped_parts(collector.model.get_submodule(block))
            for layer in _join_paths(block, (attention.query, attention.key))
        ]
        collector.add(stream.distance_norm, readers, only=False)
    if source and stream.embedding_projection:
        collector.add(source, [stream.embedding_projection], only=True)
        source = None
    elif source:
        collector.add(source, [], only=False)
    for block in _block_paths(collector.model, stack):
        is_routed = stack.feed_forward.experts is not None  # the router, no linear layer, uses the norm too
        part_inputs = [*map(_state_layers, stack.attentions)]
        part_inputs.append(_expert_inputs(collector.model.get_submodule(block), stack.feed_forward))
        removed_parts = skipped_parts(collector.model.get_submodule(block))
        for index, (name, layers) in enumerate(zip(stream.part_norms, part_inputs, strict=True)):
            norm, readers = f"{block}.{name}", [] if index in removed_parts else _join_paths(block, layers)
            if stream.pre_norm and has_norm_at(collector.model, norm):
                collector.add(norm, readers, only=not (is_routed and index == len(stack.attentions)))
            elif source:  # the part uses the hidden states directly, and so does the sum after it
                collector.add(source, readers, only=False)
            if index < len(stack.attentions) and index not in removed_parts:
                collector.add_qk_norms(block, stack.attentions[index])
            if stream.output_norms and has_norm_at(collector.model, f"{block}.{stream.output_norms[index]}"):
                collector.add(f"{block}.{stream.output_norms[index]}", [], only=False)
            source = None if stream.pre_norm else norm  # of a sum, in pre-norm models
    if stream.final_norm or source:
        collector.add(stream.final_norm or str(source), end, only=bool(end))


def _expert_inputs(block: Any, part: FeedForward) -> tuple[str, ...]:
    """Return the linear layers that read the states, of all experts, relative to their `block`."""
    if part.experts is None:
        return part.input_layers
    experts = getattr(block.get_submodule(part.name), part.experts.rpartition(".")[2], ())
    return tuple(layer for index in range(len(experts)) for layer in part.expert(index).input_layers)


def has_norm_at(model: Any, name: str) -> bool:
    """Return whether `model` has a norm at `name`; a removed norm has no weight."""
    module = model.get_submodule(name)
    return getattr(module, "weight", None) is not None and module.weight.dim() == 1


class _NormCollector:
    """Collects norms, each module once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.met: dict[Any, tuple[str, dict[str, None], bool]] = {}

    def add(self, norm: str, readers: list[str], only: bool) -> None:
        module = self.model.get_submodule(norm)
        name, before, is_exclusive = self.met.get(module, (norm, {}, True))
        self.met[module] = (name, before | dict.fromkeys(readers), is_exclusive and only)

    def add_qk_norms(self, block: str, attention: Attention) -> None:
        for norm in attention.qk_norms or ():
            self.add(f"{block}.{norm}", [], only=False)

    def results(self) -> list[NormConsumers]:
        owners: dict[int, set[Any]] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(module)
        by_norm = {norm: self._submodules(list(readers)) for norm, (_, readers, _) in self.met.items()}
        result = []
        for norm, (name, readers, is_exclusive) in self.met.items():
            other_leaves = {
                leaf for other_norm, leaves in by_norm.items() if other_norm is not norm for leaf in leaves
            }
            norm_leaves = by_norm[norm]
            unshared = all(
                owners[id(p)] <= norm_leaves - other_leaves
                for leaf in norm_leaves
                for p in leaf.parameters(recurse=False)
            )
            result.append(
                NormConsumers(name, tuple(readers), is_exclusive, is_exclusive and bool(readers) and unshared)
            )
        return result

    def _submodules(self, names: list[str]) -> set[Any]:
        return {leaf for name in names for leaf in self.model.get_submodule(name).modules()}


def _state_layers(attention: Attention) -> tuple[str, ...]:
    """Return the linear layers of an attention that use the states of their own stack."""
    if attention.cross:
        return (attention.query,)
    return tuple(dict.fromkeys((attention.query, attention.key, attention.value)))


def _block_paths(model: Any, stack: Stack) -> Iterator[str]:
    """Yield the name of the block of each call."""
    for number in range(len(stack.modules(model))):
        yield f"{stack.module_path}.{0 if stack.repeats_block else number}"


def _join_paths(block: str, names: tuple[str, ...]) -> list[str]:
    return [f"{block}.{name}" for name in names]


# functions f with f(x / s) = f(x) / s for every s above 0
_SCALE_INVARIANT = ("relu",)


@dataclass(frozen=True)
class SharedInput:
    """Linear layers with one input, and the producer of that input.

    consumers: dotted names. producer: the linear layer that computes the input; None if it is something else.
    start: the first row of the producer that belongs to it; the rows end at `stop`, or the last. repeats:
    how often each head of it is used (queries that share a value); width: of a head.
    """

    consumers: tuple[str, ...]
    producer: str | None = None
    start: int = 0
    stop: int | None = None
    repeats: int = 1
    head_dim: int = 1


def shared_inputs(model: Any) -> list[SharedInput]:
    """Return the inputs of all linear layers in the blocks of `model`, each layer in one of them, in order.

    The encoder's output is one input, of the cross-attentions of all blocks.
    """
    config, blocks = model.config.to_dict(), blocks_of(model)
    cross_layers = [n for b in blocks for a in b.attentions if a.cross for n in (a.key, a.value)]
    block_inputs = [feed for block in blocks for feed in _block_inputs(model, block, config)]
    return ([SharedInput(tuple(dict.fromkeys(cross_layers)))] if cross_layers else []) + block_inputs


def _block_inputs(model: Any, block: Block, config: dict[str, Any]) -> Iterator[SharedInput]:
    for attention in block.attentions:
        projections = (attention.query, attention.key, attention.value)[: 1 if attention.cross else 3]
        yield SharedInput(tuple(dict.fromkeys(projections)))
        yield _attention_output_input(model, attention)
    feed_forwards = block.feed_forwards  # the part may be removed
    if feed_forwards:
        yield SharedInput(tuple(layer for part in feed_forwards for layer in part.input_layers))
    for part in feed_forwards:
        yield _feed_forward_output_input(model, part, config)


def _attention_output_input(model: Any, attention: Attention) -> SharedInput:
    """Return the input of an attention's output layer: values, mixed over tokens but not over channels."""
    if attention.packed == "per_head":  # the rows of the values are not consecutive
        return SharedInput((attention.out,))
    out_width = int(model.get_submodule(attention.out).in_features)
    value_width = int(model.get_submodule(attention.value).out_features)
    values = (
        (value_width - out_width) // 2 if attention.packed else value_width
    )  # the packed ones: queries, keys, values
    if values <= 0 or out_width % values:
        return SharedInput((attention.out,))
    repeats = out_width // values
    width = (
        int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
        if repeats > 1
        else values
    )
    return SharedInput((attention.out,), attention.value, value_width - values, None, repeats, width)


def _feed_forward_output_input(model: Any, part: FeedForward, config: dict[str, Any]) -> SharedInput:
    """Return the input of the last linear layer of a feed-forward part, if gated or after ReLU."""
    if part.gate is None:
        is_scale_invariant = config_value(config, part.activation_key) in _SCALE_INVARIANT
        return SharedInput((part.down,), part.up if is_scale_invariant else None)
    is_ungated, first = (
        (part.gate, part.gate_first) if part.activated_layer == "up" else (part.up, not part.gate_first)
    )
    if part.gate != part.up:
        return SharedInput((part.down,), is_ungated)
    half_width = int(model.get_submodule(part.up).out_features) // 2
    return SharedInput((part.down,), part.up, *((0, half_width) if first else (half_width, None)))
