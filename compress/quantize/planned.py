"""Which layers of a model are quantized, and how each: what the settings say of a model's own parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.labels import CLASSIFIERS
from smelt.families.registry import family_of
from smelt.runtime.schemes.registry import SCHEMES
from smelt.runtime.schemes.scheme import Value

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.compress.quantize.coding import Coder


@dataclass(frozen=True)
class Planned:
    """A layer that will be quantized: the module, its first name, the scheme and its options.

    product: whether it multiplies (a Linear, a Conv2d) instead of looking rows up. signed: of a Conv2d,
    whether what it reads may be negative, as far as rows have shown.
    """

    module: Any
    name: str
    scheme: str
    options: Mapping[str, Value]
    product: bool
    signed: bool = True

    @property
    def weight(self) -> int:
        """The identity of its weight, which other layers may have too."""
        return id(self.module.weight)

    @property
    def observes(self) -> bool:
        """Whether it needs the range of its activations."""
        return self.product and SCHEMES[self.scheme].observes


def plan_layers(model: Any, settings: QuantizeSettings) -> list[Planned]:
    """Return the layers of `model` that `settings` want quantized, in the model's order."""
    from torch import nn

    from smelt.runtime.layers.quantized import is_table
    from smelt.runtime.models.structure import names_of

    head = output_layer(model)
    words = {id(m.weight) for m in word_embeddings(model)}
    separate = set(separated(model))
    found = []
    for module, names in names_of(model).items():
        if any(fnmatchcase(n, pattern) for n in names for pattern in settings.patterns):
            continue
        product = isinstance(module, nn.Linear)
        if isinstance(module, nn.Conv2d) and SCHEMES[settings.scheme].convolutions and of_convolutions(model):
            if module in separate:
                continue
            options = settings.options(settings.scheme)
            found.append(Planned(module, names[0], settings.scheme, options, product=True))
            continue
        if product:
            if module is head and not settings.output_layer:
                continue
        elif not (is_table(module) and settings.embeddings and id(module.weight) in words):
            continue
        scheme = settings.table_scheme if module is head or not product else settings.scheme
        found.append(Planned(module, names[0], scheme, settings.options(scheme), product))
    return found


def separated(model: Any) -> list[Any]:
    """Return the convolutions that stand for others by CP, which stay float.

    Between them each channel has a range of its own, and one scale for all leaves little of the small ones:
    int8 was off by a third of the outputs' spread where the whole convolutions were by a twentieth.
    """
    from smelt.runtime.layers.low_rank_conv import LowRankConv

    thin = [list(m.steps) for m in model.modules() if isinstance(m, LowRankConv)]
    return [step for steps in thin if any(one.groups != 1 for one in steps) for step in steps]


def of_convolutions(model: Any) -> bool:
    """Say whether `model` is a network of convolutions; those that cut patches for blocks stay float."""
    family = family_of(model)
    return family is not None and family.chain is not None


def quantize_model(model: Any, settings: QuantizeSettings) -> list[dict[str, Any]]:
    """Quantize `model` in place by schemes that need no data; return the edits that make room for the result.

    Raises:
        InputError: a layer's weights are not finite.
    """
    return quantize_layers(model, plan_layers(model, settings), {})


def quantize_layers(
    model: Any,
    layers: Collection[Planned],
    ranges: Mapping[int, float],
    coder_of: Callable[[Planned], Coder | None] = lambda layer: None,
    pairs: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Quantize `layers` of `model` in place; return the edits that make room for the result.

    Args:
        model: changed.
        layers: of it.
        ranges: the largest magnitude of the activations, by `Planned.weight`, of layers that want to know it.
        coder_of: what decides the codes of a layer; None: each weight becomes the nearest value.
        pairs: what stands beside the codes, by `Planned.weight`: float32 [N, r] and [r, K].

    Raises:
        InputError: a layer's weights are not finite, or its range is not there.
    """
    from smelt.runtime.layers.adapted import adapted
    from smelt.runtime.models.structure import replace_layer

    # by the weight's identity: the first module quantized from it
    done: dict[int, tuple[str, Any]] = {}
    edits: list[dict[str, Any]] = []
    for layer in layers:
        weight = layer.weight  # replacing the module may free its memory for another one
        new = quantized(layer, ranges, coder_of(layer))
        first_name, first = done.setdefault(weight, (layer.name, new))
        told = dict(layer.options)
        edit = {"op": "quantize", "module": layer.name, "scheme": layer.scheme, **told}
        replace_layer(model, edits, layer.name, new, edit)
        if not layer.signed:
            edits.append({"op": "unsigned", "module": layer.name})
        if first is not new:
            if layer.observes:  # the first one may be a table, which has no range
                first.matrix.set_range_(ranges[weight])
            new.matrix = first.matrix
            edits.append({"op": "share", "module": f"{layer.name}.matrix", "with": f"{first_name}.matrix"})
        if layer.product and weight in pairs:
            up, down = pairs[weight]
            edit = {"op": "adapter", "module": layer.name, "rank": len(down)}
            replace_layer(model, edits, layer.name, adapted(new, up, down), edit)
    return edits


def require_weights(layers: Collection[Planned]) -> None:
    """Refuse weights that are not finite before any method looks at them.

    Raises:
        InputError: a layer has some.
    """
    from smelt.compress.quantize.coding import require_finite

    for layer in layers:
        try:
            require_finite(layer.module.weight)
        except InputError as error:
            raise InputError(f"quantize: {layer.name}: {error}", code=error.code) from error


def quantized(layer: Planned, ranges: Mapping[int, float], coder: Coder | None = None) -> Any:
    """Return the quantized counterpart of a layer; arguments and errors as in `quantize_layers`."""
    from smelt.compress.quantize.coding import quantize_module, round_to_nearest
    from smelt.runtime.layers.quantized import QuantizedEmbedding
    from smelt.runtime.layers.quantized_conv import QuantizedConv2d

    try:
        new = quantize_module(layer.module, layer.scheme, layer.options, coder or round_to_nearest)
    except InputError as error:
        raise InputError(f"quantize: {layer.name}: {error}", code=error.code) from error
    if layer.observes:
        if layer.weight not in ranges:
            raise InputError(
                f"quantize: {layer.name}: scheme {layer.scheme} needs the range of activations.",
                code="missing-range",
            )
        if isinstance(new, QuantizedConv2d):
            new.signed = layer.signed
        assert not isinstance(new, QuantizedEmbedding)
        new.set_range_(ranges[layer.weight])
    return new


def output_layer(model: Any) -> Any:
    """Return the layer that gives the logits: the product with the vocabulary, or a classifier's last."""
    from torch import nn

    from smelt.runtime.layers.low_rank import LowRankLinear

    head = model.get_output_embeddings()
    if isinstance(head, LowRankLinear) and any(head.up.weight is m.weight for m in word_embeddings(model)):
        head = head.up  # what it has in common with the table
    if head is None and type(model).__name__.endswith(CLASSIFIERS):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        head = next((m for m in reversed(linears) if m.out_features == model.config.num_labels), None)
    return head


def word_embeddings(model: Any) -> list[Any]:
    """Return the embeddings that token ids are looked up in (not positions, not token types)."""
    from smelt.runtime.layers.low_rank import LowRankEmbedding
    from smelt.runtime.layers.quantized import is_table

    if of_convolutions(model):
        return []
    found = [m.table if isinstance(m, LowRankEmbedding) else m for m in input_tables(model)]
    return [m for m in found if is_table(m)]


def input_tables(model: Any) -> list[Any]:
    """Return the modules that token ids are looked up in, whatever they are."""
    found = [model.get_input_embeddings()]
    if model.config.is_encoder_decoder:
        found += [model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()]
    return found


def unused_patterns(model: Any, patterns: list[str]) -> list[str]:
    """Return the patterns that no module's name matches; what chooses by itself is none."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
