"""Derive the layouts of the model families from tiny models of transformers, and write them.

    make layouts                # of all families
    make layouts NAME=albert    # of one

A layout is what a family's modules are called and which keys of its config their sizes come from, see
`Layout` in smelt/models/families/layout.py. A tiny random model runs once. Modules are found by their calls,
projections by the gradient graph around each softmax: queries and keys are the operands of the product before
it, values an operand of the product after it. A config key is found by changing it: the key of the heads is
the one that changes their number. What cannot be described is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from smelt.core.files import write_json
from smelt.models.experts import Experts, separate_experts
from smelt.models.families.family import Family, Tower
from smelt.models.families.layout import (
    LAYOUT_FOLDER,
    Attention,
    FeedForward,
    Layout,
    ResidualStream,
    Stack,
    layout_to_json,
)
from smelt.models.families.registry import FAMILIES
from tools.family_trace import CannotDescribeError, Trace, is_linear, is_norm, is_table

HIDDEN, EMBEDDING, HEADS, KV_HEADS, HEAD_DIM, NEURONS, LAYERS = 48, 20, 4, 2, 12, 56, 3
# Sizes of the tiny model by config key; all kinds of size differ, so that a size tells its kind.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim"), NEURONS),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), NEURONS),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 40),
    **{"max_source_positions": 7, "num_mel_bins": 10},
    "embedding_size": EMBEDDING, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "d_kv": HEAD_DIM,
    "vocab_size": 64, "type_vocab_size": 2, "relative_attention_num_buckets": 32, "image_size": 16,
    "patch_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "attention_multiplier": 0.5,
}  # fmt: skip


def _rows(module: Any) -> int:
    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def _columns(module: Any) -> int:
    return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])


def derive_layout(family: Family, more: Mapping[str, Any]) -> Layout:
    """Return the layout of a tiny model of `family` with `more` keys of its config."""
    if not family.towers:
        return _derive_model_layout(family, family.name, more)
    stacks = [
        _tower_stack(tower, stack)
        for tower in family.towers
        for stack in _derive_model_layout(family, tower.model_type, {**more, **tower.example}).stacks
    ]
    return Layout(stacks=tuple(stacks), hidden_size_key="", head_modules=())


def _tower_stack(tower: Tower, stack: Stack) -> Stack:
    """Return the stack of a tower, a model of its own, with the names that it has in the whole model."""

    def inside(name: str | None) -> Any:
        return name and f"{tower.module}.{name}"

    def nested(key: str | None) -> Any:
        return key and f"{tower.config_key}.{key}"

    stream, feed = stack.stream, stack.feed_forward
    stream = replace(
        stream,
        embeddings=tuple(map(inside, stream.embeddings)),
        embedding_norm=inside(stream.embedding_norm),
        final_norm=inside(stream.final_norm),
        other_tensors=tuple((inside(name), axis) for name, axis in stream.other_tensors),
    )
    attentions = (
        replace(a, heads_key=nested(a.heads_key), head_dim_key=nested(a.head_dim_key))
        for a in stack.attentions
    )
    return replace(
        stack,
        name=tower.stack,
        module_path=inside(stack.module_path),
        num_layers_key=nested(stack.num_layers_key),
        attentions=tuple(attentions),
        feed_forward=replace(
            feed,
            intermediate_size_key=nested(feed.intermediate_size_key),
            activation_key=nested(feed.activation_key),
        ),
        stream=stream,
    )


def _derive_model_layout(family: Family, model_type: str, more: Mapping[str, Any]) -> Layout:
    trace = Trace(_tiny_config(model_type, more), family)
    softmaxes = [n for n in trace.nodes[::-1] if n.name() == "SoftmaxBackward0"]
    # scores are [B, H, S, S]; a router's are of tokens and experts
    attentions = [_attention(trace, node) for node in softmaxes if node._saved_result.dim() == 4]
    order = {name: index for index, name in reversed(list(enumerate(trace.calls)))}
    attentions = list({a.query + a.key: a for a in sorted(attentions, key=lambda a: order[a.query])}.values())
    stacks = _stacks(trace, attentions)
    keys = _config_keys(trace, stacks, more)
    stacks = tuple(keys.complete(stack) for stack in stacks)
    inside = tuple(f"{stack.module_path}." for stack in stacks)
    last = max((index for index, name in enumerate(trace.calls) if name.startswith(inside)), default=-1)
    closing = {stack.stream.final_norm for stack in stacks}
    head = [name for name in trace.calls[last + 1 :] if stacks or is_linear(trace.module(name))]
    head = [name for name in head if name not in closing] if stacks else head[-1:]
    biases = [n for n, b in trace.model.named_buffers() if b.shape == (1, 64)]
    transposed = [n for n, m in trace.model.named_modules() if isinstance(m, Conv1D)]
    return Layout(
        stacks=stacks,
        hidden_size_key=keys.hidden_size,
        embedding_size_key=keys.embedding_size,
        default_embedding_size=_default_embedding_size(model_type, keys.hidden_size, keys.embedding_size),
        head_modules=tuple(name for name in head if name not in closing),
        head_input_vectors=_head_input_vectors(trace, head) if stacks else 1,
        logits_bias=biases[0] if biases else None,
        transposed_suffixes=tuple(dict.fromkeys(".".join(n.split(".")[-2:]) for n in transposed)),
    )


def _head_input_vectors(trace: Trace, head: list[str]) -> int:
    first = trace.module(head[0])
    return _columns(first) // HIDDEN if is_linear(first) else 1


def _tiny_config(name: str, more: Mapping[str, Any]) -> Any:
    known = CONFIG_MAPPING[name]().to_dict()
    values = {key: value for key, value in SIZES.items() if key in known} | dict(more)
    # ids of tokens beyond the tiny vocabulary
    values |= {k: 1 for k, v in known.items() if k.endswith("token_id") and isinstance(v, int) and v >= 60}
    return CONFIG_MAPPING[name](**values)


def _attention(trace: Trace, softmax: Any) -> Attention:
    """Return an attention with full names, without config keys."""
    product, weighted = trace.product_before(softmax), trace.product_after(softmax)
    (query_source, *_), query_path = trace.sources(product.next_functions[0][0])
    (key_source, *_), _ = trace.sources(product.next_functions[1][0])
    (value, *_), _ = trace.sources(weighted.next_functions[1][0])
    normed = is_norm(trace.module(query_source))
    query, key = (trace.before(s)[0] if normed else s for s in (query_source, key_source))
    out = trace.readers(weighted)[0]
    name = query.rpartition(".")[0]
    module, rows, width = trace.module(name), _rows(trace.module(query)), _columns(trace.module(out))
    head_dim = _attribute(module, HEAD_DIM, ("head", "proj"))
    if head_dim is None:
        raise CannotDescribeError(f"{name} has no attribute with the width of a head")
    packed: Literal["equal", "grouped"] | None = None
    if query == value:
        packed = "equal" if rows == 3 * width else "grouped"
    scaling = getattr(module, "scaling", None)
    kv_heads = _attribute(module, KV_HEADS, ("key_value_heads",))
    norms = [n for n in trace.calls if n.startswith(f"{name}.") and is_norm(trace.module(n))]
    weights = softmax._saved_result
    cross = weights.shape[-1] != weights.shape[-2]
    if not cross and not weights.triu(1).any():
        trace.causal_queries.add(query)
    return Attention(
        name, query=query, key=key, value=value, out=out,
        heads_attribute=_attribute(module, HEADS, ("num_attention_heads", "num_heads", "n_heads")),
        head_dim_attribute=head_dim,
        heads_key="",
        all_head_size_attribute=_attribute(module, width, ("all_head_size", "split_size")),
        cross=cross,
        packed=packed,
        kv_heads_attribute=kv_heads if packed == "grouped" else None,
        scale_attribute="width" if scaling is None else None if scaling == 1 else "scaling",
        rotary="NegBackward0" in query_path,
        qk_norms=(query_source, key_source) if normed else None,
        residual_norm=next((n for n in norms if n not in (query_source, key_source)), None),
    )  # fmt: skip


def _attribute(module: Any, value: int, words: Iterable[str]) -> str | None:
    """Return the first attribute of `module` with this value whose name has one of `words`."""
    return next(
        (
            n
            for w in words
            for n, v in vars(module).items()
            if type(v) is int and v == value and w in n and not n.startswith("_")
        ),
        None,
    )


def _stacks(trace: Trace, attentions: list[Attention]) -> tuple[Stack, ...]:
    """Return the stacks in the order of their calls, with names relative to a block, without config keys."""
    by_list: dict[str, list[Attention]] = {}
    for attention in attentions:
        by_list.setdefault(_block_list(trace, attention, attentions), []).append(attention)
    stacks: list[Stack] = []
    start = 0
    for number, (path, members) in enumerate(by_list.items()):
        stack, start = _stack(trace, path, members, start, number, len(by_list))
        stacks.append(stack)
    return tuple(stacks)


def _block_list(trace: Trace, attention: Attention, attentions: list[Attention]) -> str:
    """Return the innermost list of modules around `attention` of which each has an attention."""
    parts = attention.query.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        module = trace.module(path)
        if isinstance(module, nn.ModuleList) and all(
            any(a.query.startswith(f"{path}.{number}.") for a in attentions) for number in range(len(module))
        ):
            return path
    raise CannotDescribeError(f"{attention.query} is in no list of blocks")


def _stack(
    trace: Trace, path: str, attentions: list[Attention], start: int, number: int, count: int
) -> tuple[Stack, int]:
    """Return a stack, and the index of the call after its final norm; the calls from `start` are its own."""
    length = len(trace.module(path))
    block = f"{path}.{length - 1}"  # the first may lack a norm (ModernBERT)
    members = [a for a in attentions if a.query.startswith(f"{block}.")]
    inside = [index for index, name in enumerate(trace.calls) if name.startswith(f"{path}.")]
    before = list(dict.fromkeys(trace.calls[start : inside[0]]))
    distance_norm, distance_embeddings = _normed_table(trace, before)
    before = [name for name in before if name != distance_norm]
    block_modules = list(dict.fromkeys(name for name in trace.calls if name.startswith(f"{block}.")))
    special = {norm for a in members for norm in a.qk_norms or ()}
    norms = [n for n in block_modules if is_norm(trace.module(n)) and n not in special]
    parts = len(members) + 1
    output_norms = norms[1::2] if len(norms) == 2 * parts else []
    norms = norms[::2] if output_norms else norms * parts if len(norms) == 1 else norms
    if len(norms) != parts:
        raise CannotDescribeError(f"{block} has {parts} parts and the norms {', '.join(norms)}")
    projected = {name for a in members for name in a.linear_layers}
    linear = [n for n in block_modules if is_linear(trace.module(n)) and n not in projected]
    after = trace.calls[inside[-1] + 1 :]
    root = path.rpartition(".")[0]
    final = [
        n for n in after[:1] if is_norm(trace.module(n)) and (number == count - 1 or n.startswith(f"{root}."))
    ]
    stream = ResidualStream(
        embeddings=_tables(trace, before, root) if trace.input_kind == "texts" else (),
        part_norms=tuple(_relative(n, block) for n in norms),
        pre_norm=block_modules.index(norms[0]) < block_modules.index(members[0].query),
        output_norms=tuple(_relative(n, block) for n in output_norms),
        embedding_norm=_only(trace, before, is_norm, "norm of the embeddings"),
        embedding_projection=_only(trace, before, is_linear, "projection of the embeddings"),
        final_norm=final[0] if final else None,
        distance_embeddings=distance_embeddings,
        distance_norm=distance_norm,
        other_tensors=_other_tensors(trace, path) if trace.input_kind == "images" else (),
        part_scales=_part_scales(trace, block),
    )
    stack = Stack(
        ("encoder_layers", "decoder_layers")[number] if count > 1 else "layers",
        num_layers_key="",
        module_path=path,
        attentions=tuple(_relative_attention(a, block) for a in members),
        feed_forward=_feed_forward(trace, block, linear),
        stream=stream,
        causal=any(attention.query in trace.causal_queries for attention in members),
        repeats_block=length == 1 < trace.all_calls.count(block),
    )
    return stack, inside[-1] + 1 + len(final)


def _relative(name: str, block: str) -> str:
    return name.removeprefix(f"{block}.").removeprefix(block)


def _relative_attention(attention: Attention, block: str) -> Attention:
    names = ("name", "query", "key", "value", "out", "residual_norm")
    values: dict[str, Any] = {
        n: v and _relative(v, block) for n in names if (v := getattr(attention, n)) is not None
    }
    if attention.qk_norms is not None:
        values["qk_norms"] = tuple(_relative(norm, block) for norm in attention.qk_norms)
    return replace(attention, **values)


def _only(trace: Trace, names: list[str], test: Callable[[nn.Module], bool], what: str) -> str | None:
    matches = [name for name in names if test(trace.module(name))]
    if len(matches) > 1:
        raise CannotDescribeError(f"more than one {what}: {', '.join(matches)}")
    return matches[0] if matches else None


def _tables(trace: Trace, names: list[str], root: str) -> tuple[str, ...]:
    """Return the embeddings among these modules, the tokens' first and the others by name."""
    words = trace.outputs[next(n for n in names if is_table(trace.module(n)))].shape[-1] if names else 0
    tables = []
    for name in [*names[:1], *sorted(names[1:])]:
        module = trace.module(name)
        if not is_table(module):
            continue
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        tensor, value = next((name, value) for name, value in tensors if value.dim() == 2)
        if value.shape[-1] == words:
            aliases = [n for n, m in trace.model.named_modules(remove_duplicate=False) if m is module]
            tables.append(f"{next((n for n in aliases if n.startswith(f'{root}.')), name)}.{tensor}")
    return tuple(tables)


def _normed_table(trace: Trace, names: list[str]) -> tuple[str | None, str | None]:
    """Return the norm among these modules whose input is a parameter, and that parameter; None without."""
    parameters = {parameter: name for name, parameter in trace.model.named_parameters()}
    for name in names:
        if is_norm(trace.module(name)) and trace.inputs[name] in parameters:
            return name, parameters[trace.inputs[name]]
    return None, None


def _other_tensors(trace: Trace, path: str) -> tuple[tuple[str, int], ...]:
    tensors = []
    for name, parameter in trace.model.named_parameters():
        owner = trace.module(name.rpartition(".")[0])
        if not (name.startswith(f"{path}.") or is_linear(owner) or is_norm(owner)):
            tensors.append((name, tuple(parameter.shape).index(HIDDEN)))
    return tuple(tensors)


def _part_scales(trace: Trace, block: str) -> tuple[str, ...]:
    """Return the tensors of a block, as wide as the states, that are in no linear layer or norm."""
    return tuple(
        name
        for name, parameter in trace.module(block).named_parameters()
        if parameter.shape == (HIDDEN,)
        and not is_linear(owner := trace.module(f"{block}.{name}".rpartition(".")[0]))
        and not is_norm(owner)
    )


def _feed_forward(trace: Trace, block: str, linear: list[str]) -> FeedForward:
    """Return the feed-forward part of these layers, in the order of their calls, without config keys."""
    lists = (name for name, module in trace.model.named_modules() if type(module) is Experts)
    experts = next((name for name in lists if name.startswith(f"{block}.")), None)
    if experts is not None:
        first = [name for name in linear if name.startswith(f"{experts}.0.")]
        if any(not name.startswith(f"{experts}.") for name in linear):
            raise CannotDescribeError(f"{block} has linear layers next to its experts: {', '.join(linear)}")
        return _experts(trace, block, experts, _feed_forward_of(trace, block, first))
    return _feed_forward_of(trace, block, linear)


def _experts(trace: Trace, block: str, experts: str, first: FeedForward) -> FeedForward:
    """Return the feed-forward part of the list `experts`, whose first one is `first`."""
    path, name = _relative(experts, block), _relative(experts.rpartition(".")[0], block)
    owner = trace.module(experts.rpartition(".")[0])
    routers = [n for n, m in owner.named_children() if n != path.rpartition(".")[2] and list(m.parameters())]
    if len(routers) != 1:
        raise CannotDescribeError(f"{block}.{name} has the modules {', '.join(routers)} next to its experts")
    up, down, gate = (n and n.replace(f"{path}.0.", f"{path}.*.") for n in (first.up, first.down, first.gate))
    return replace(
        first, name=name, up=str(up), down=str(down), gate=gate, experts=path, router=f"{name}.{routers[0]}"
    )


def _feed_forward_of(trace: Trace, block: str, linear: list[str]) -> FeedForward:
    """Return the feed-forward part, or expert, of these layers."""
    if not 2 <= len(linear) <= 3:
        raise CannotDescribeError(f"{block} has the feed-forward layers {', '.join(linear)}")
    *inputs, down = linear
    packed = _rows(trace.module(inputs[0])) == 2 * _columns(trace.module(down))
    up, gate = inputs[0], inputs[0] if packed else None
    if len(inputs) == 2:
        gate = next((name for name in inputs if "gate" in name), inputs[1])
        up = next(name for name in inputs if name != gate)
    owners = {name.rpartition(".")[0] for name in (up, down)}
    return FeedForward(
        _relative(owners.pop(), block) if len(owners) == 1 else "",
        _relative(up, block), _relative(down, block), intermediate_size_key="", activation_key="",
        gate=gate and _relative(gate, block), gate_first=not packed or "gate" in up,
    )  # fmt: skip


class _ConfigKeys:
    """The config keys that change each size of a tiny model."""

    def __init__(self, trace: Trace, stacks: tuple[Stack, ...], changes: Mapping[str, set[str]]) -> None:
        self._trace, self._stacks, self._changes = trace, stacks, changes
        self.hidden_size = (self._key("hidden") or "") if stacks else ""
        self.embedding_size = self._key("embedding", without=("hidden",)) if stacks else None

    def _key(self, what: str, without: tuple[str, ...] = ()) -> str | None:
        """Return the config key that changes the size `what` and none of `without`."""
        keys = [k for k, sizes in self._changes.items() if what in sizes and sizes.isdisjoint(without)]
        if len(keys) > 1:
            raise CannotDescribeError(f"{what} depends on several config keys: {', '.join(keys)}")
        return keys[0] if keys else None

    def complete(self, stack: Stack) -> Stack:
        """Return `stack` with its config keys."""
        name = stack.name
        attentions = tuple(
            replace(
                attention,
                heads_key=self._required(f"{name}.{number}.heads"),
                kv_heads_key=self._key(f"{name}.{number}.kv_heads", without=(f"{name}.{number}.heads",)),
                head_dim_key=self._key(
                    f"{name}.{number}.head_dim", without=(f"{name}.{number}.heads", "hidden")
                ),
            )
            for number, attention in enumerate(stack.attentions)
        )
        config = self._trace.config.to_dict()
        feed = replace(
            stack.feed_forward,
            intermediate_size_key=self._required(f"{name}.neurons"),
            activation_key=self._required(f"{name}.activation"),
            num_experts_key=self._key(f"{name}.experts"),
        )
        down = self._trace.module(f"{stack.module_path}.0.{feed.expert(0).down}")
        feed = replace(feed, size_is_ratio=config[feed.intermediate_size_key] != _columns(down))
        return replace(
            stack,
            num_layers_key=self._required(f"{name}.layers"),
            attentions=attentions,
            feed_forward=replace(feed, activated_layer=_activated_layer(self._trace, stack, feed)),
            per_layer_keys=tuple(k for k, v in config.items() if isinstance(v, list) and len(v) == LAYERS),
        )

    def _required(self, what: str) -> str:
        key = self._key(what, without=("hidden",) if what.endswith(("neurons", "layers")) else ())
        if key is None:
            raise CannotDescribeError(f"no config key changes {what}")
        return key


def _activated_layer(trace: Trace, stack: Stack, feed: FeedForward) -> Any:
    """Return which of two input layers the activation function is applied to, by computing it."""
    if feed.gate is None:
        return "gate"
    block = f"{stack.module_path}.{len(trace.module(stack.module_path)) - 1}"
    feed = feed.expert(0)
    if feed.gate == feed.up:
        first, second = trace.outputs[f"{block}.{feed.up}"].chunk(2, dim=-1)
        up, gate = (second, first) if feed.gate_first else (first, second)
    else:
        up, gate = trace.outputs[f"{block}.{feed.up}"], trace.outputs[f"{block}.{feed.gate}"]
    function, expected = (
        ACT2FN[getattr(trace.config, feed.activation_key)],
        trace.inputs[f"{block}.{feed.down}"],
    )
    if torch.allclose(function(gate) * up, expected, atol=1e-6):
        return "gate"
    if torch.allclose(function(up) * gate, expected, atol=1e-6):
        return "up"
    raise CannotDescribeError(f"{block}.{feed.down} reads no product of an activated layer and another")


def _config_keys(trace: Trace, stacks: tuple[Stack, ...], more: Mapping[str, Any]) -> _ConfigKeys:
    """Change each config key in turn; return which sizes it changes."""
    changes: dict[str, set[str]] = {}
    sizes = _sizes(trace.model, stacks)
    known = trace.config.to_dict()
    for key, value in (known | {"head_dim": known.get("head_dim")}).items():
        for other in _other_values(key, value):
            changed = _changed_sizes(trace, stacks, more, key, other)
            different = {what for what in sizes if changed and changed[what] != sizes[what]}
            if _changes_calls(trace, stacks, more, key, other):
                different.add(f"{stacks[0].name}.layers")
            if different and (key in known or not _has_head_dim_key(changes, known)):
                changes[key] = different
    return _ConfigKeys(trace, stacks, changes)


def _changes_calls(
    trace: Trace, stacks: tuple[Stack, ...], more: Mapping[str, Any], key: str, value: Any
) -> bool:
    """Return whether a block that is called several times is called another number of times."""
    if not any(stack.repeats_block for stack in stacks):
        return False
    try:
        changed = Trace(_tiny_config(trace.config.model_type, {**more, key: value}), trace.family)
    except Exception:
        return False
    block = f"{stacks[0].module_path}.0"
    return changed.all_calls.count(block) != trace.all_calls.count(block)


def _has_head_dim_key(changes: Mapping[str, set[str]], known: Mapping[str, Any]) -> bool:
    """Return whether a key of the config itself is that of the width of a head (T5's d_kv)."""
    return any(
        key in known and sizes and all(w.endswith("head_dim") for w in sizes)
        for key, sizes in changes.items()
    )


def _changed_sizes(
    trace: Trace, stacks: tuple[Stack, ...], more: Mapping[str, Any], key: str, value: Any
) -> dict[str, Any] | None:
    """Return the sizes of a model with another value of a config key; None if there is no such model."""
    config = _tiny_config(trace.config.model_type, more)
    setattr(config, key, value)
    changed_model = (
        [config]
        if isinstance(value, str)
        else [config, _tiny_config(trace.config.model_type, {**more, key: value})]
    )
    for config in changed_model:  # other keys may follow from it only where a config is created
        try:
            with torch.device("meta"):
                model = type(trace.model)(config)
            separate_experts(model)
            return _sizes(model, stacks)
        except Exception:
            continue
    return None


def _other_values(key: str, value: Any) -> list[Any]:
    if key.endswith(("token_id", "vocab_size")) or isinstance(value, bool):
        return []
    if isinstance(value, str):
        return ["silu" if value != "silu" else "relu"] if value in ACT2FN else []
    if value is None:
        return [HEAD_DIM // 2] if key == "head_dim" else []
    return [value // 2 if value % 2 == 0 else value + 1] if isinstance(value, int) and value > 1 else []


def _sizes(model: Any, stacks: tuple[Stack, ...]) -> dict[str, Any]:
    """Return the sizes of a model by what they are."""
    sizes: dict[str, Any] = {}
    for stack in stacks:
        block = model.get_submodule(stack.module_path)[0]
        feed = stack.feed_forward
        down = block.get_submodule(feed.expert(0).down)
        if feed.experts is not None:
            sizes[f"{stack.name}.experts"] = len(block.get_submodule(feed.experts))
        sizes.setdefault("hidden", _rows(down))
        sizes[f"{stack.name}.neurons"] = _columns(down)
        sizes[f"{stack.name}.layers"] = len(model.get_submodule(stack.module_path))
        leaves = [m for m in block.modules() if not list(m.children()) and not list(m.parameters())]
        sizes[f"{stack.name}.activation"] = [type(leaf).__name__ for leaf in leaves]
        for number, attention in enumerate(stack.attentions):
            module = block.get_submodule(attention.name)
            head_dim = int(getattr(module, attention.head_dim_attribute))
            heads = _columns(block.get_submodule(attention.out)) // head_dim
            rows = _rows(block.get_submodule(attention.key))
            if attention.packed:
                rows = (rows - heads * head_dim) // 2
            name = f"{stack.name}.{number}"
            sizes |= {
                f"{name}.heads": heads,
                f"{name}.kv_heads": rows // head_dim,
                f"{name}.head_dim": head_dim,
            }
    tables = [table for stack in stacks for table in stack.stream.embeddings[:1]]
    sizes["embedding"] = getattr(*_owner(model, tables[0])).shape[-1] if tables else None
    return sizes


def _owner(model: Any, tensor: str) -> tuple[Any, str]:
    owner, _, name = tensor.rpartition(".")
    return model.get_submodule(owner), name


def _default_embedding_size(name: str, hidden_key: str, key: str | None) -> int | None:
    config = CONFIG_MAPPING[name]()
    size = getattr(config, key) if key else None
    return size if size is not None and size != getattr(config, hidden_key) else None


def derive_all(name: str) -> dict[str, Layout]:
    """Return the layouts of a family by the names of their files."""
    family = FAMILIES[name]
    variants: dict[str, Mapping[str, Any]] = {"": {}} | {
        variant.name: variant.example for variant in family.layout_variants
    }
    return {
        f"{name}-{variant}".rstrip("-"): derive_layout(family, {**family.layout_config, **more})
        for variant, more in variants.items()
    }


def main(names: list[str]) -> int:
    """Write the layouts of these families, or of all."""
    for name in names or FAMILIES:
        try:
            for file, layout in derive_all(name).items():
                write_json(LAYOUT_FOLDER / f"{file}.json", layout_to_json(layout))
                print(f"{LAYOUT_FOLDER.name}/{file}.json")
        except CannotDescribeError as error:
            print(f"{name}: cannot be described: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
