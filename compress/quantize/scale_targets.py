"""Where scales of input channels go, so that the float model computes the same.

The target of the scales is the producer of the layers' input, or a factor before them:

    a norm that only these layers read                   its weight and bias are divided
    a linear layer that only they read directly          its rows and bias are divided
    anything else                                        the input is multiplied (`ScaledLinear`)

In all three cases the columns of the layers are multiplied. The columns of a matrix that is also an
embedding, or belongs to other layers, are not changed. The output layer, the largest linear layer, gets no
factor of its own.

Norms and factors are stored in their original dtype. The rounding error is included in the scales, so that
they match the columns exactly.

Shapes: K = inputs of a linear layer, N = its outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart
from smelt.compress.quantize.plan_layers import PlannedLayer, output_layer
from smelt.core.errors import InputError
from smelt.models.edits import Edit, module_names, replace_layer
from smelt.models.families.registry import (
    NormConsumers,
    SharedInput,
    family_of,
    norm_consumers,
    shared_inputs,
)
from smelt.models.layers import LowRankLinear, ScaledLinear, SharedLinear
from smelt.stage import Context

# Returns the stored dtype of a weight from all of its names.
DtypeOf = Callable[[Sequence[str]], torch.dtype]

ScaleKind = Literal["norms", "layers", "factors"]


@dataclass(frozen=True)
class NormGroup:
    """A norm, the layers that read its output, and their matrices [N, K]."""

    norm: str
    consumers: list[nn.Module]
    linear_layers: list[nn.Linear]


@dataclass
class ScaleTarget:
    """Linear layers with one input that will be quantized, and the target of their scales.

    layers: these layers. norm: the norm with all of its readers, if it takes the scales. producer: the linear
    layer that takes them, with the rows that `shared_input` defines. Without either, the input is multiplied.
    """

    layers: list[PlannedLayer]
    norm: NormGroup | None = None
    producer: nn.Linear | None = None
    shared_input: SharedInput = field(default_factory=lambda: SharedInput(()))

    @property
    def kind(self) -> ScaleKind:
        """The kind of target."""
        return "norms" if self.norm else "layers" if self.producer else "factors"

    def modules(self, model: Any) -> list[nn.Module]:
        """Return the modules of `model` whose weights `apply` changes."""
        norm = [] if self.norm is None else [model.get_submodule(self.norm.norm), *self.norm.linear_layers]
        producer = [] if self.producer is None else [self.producer]
        return [*norm, *producer, *(layer.module for layer in self.layers)]

    def pool(self, magnitudes: Tensor, reduce: Callable[..., Tensor] = torch.mean) -> Tensor:
        """Return `magnitudes`, float [K], reduced over channels that have to share a scale."""
        if self.shared_input.repeats == 1:
            return magnitudes
        heads = magnitudes.reshape(-1, self.shared_input.repeats, self.shared_input.head_dim)
        return reduce(heads, dim=1, keepdim=True).expand_as(heads).flatten()

    def apply(self, model: Any, scales: Tensor, dtype_of: DtypeOf, edits: list[Edit]) -> Tensor:
        """Divide the input by `scales`, float32 [K], and multiply the columns; return the applied scales.

        Args:
            model: changed in place; `layers` too, if names change.
            scales: the wanted scales; columns include the rounding of norms and factors by their dtype.
            dtype_of: returns the stored dtype of a tensor from its names.
            edits: edits of the model; a factor appends its own.
        """
        if self.norm is not None:
            names = module_names(model)[model.get_submodule(self.norm.norm)]
            return divide_norm(model, self.norm, scales, dtype_of([f"{name}.weight" for name in names]))
        if self.producer is not None:
            self._divide_rows(self.producer, scales)
        else:
            scales = self._insert_factor(model, scales, dtype_of, edits)
        with torch.no_grad():
            for layer in self.layers:
                layer.module.weight.mul_(scales)
        return scales

    @torch.no_grad()
    def _divide_rows(self, maker: nn.Linear, scales: Tensor) -> None:
        heads = (
            scales.reshape(-1, self.shared_input.repeats, self.shared_input.head_dim)
            if self.shared_input.repeats > 1
            else None
        )
        by_row = scales if heads is None else heads[:, 0].flatten()
        rows = slice(self.shared_input.start, self.shared_input.stop)
        maker.weight[rows].div_(by_row[:, None])
        if maker.bias is not None:
            maker.bias[rows].div_(by_row)

    def _insert_factor(self, model: Any, scales: Tensor, dtype_of: DtypeOf, edits: list[Edit]) -> Tensor:
        dtype = dtype_of([f"{layer.name}.factors" for layer in self.layers])
        factors = (1 / scales).to(dtype).float()
        factors = factors.where(factors.isfinite() & (factors > 0), torch.ones(()))
        for index, layer in enumerate(self.layers):
            scaled = ScaledLinear(layer.module).train(layer.module.training)
            scaled.factors = nn.Parameter(factors.clone(), requires_grad=layer.module.weight.requires_grad)
            replace_layer(model, edits, layer.name, scaled, {"op": "scale", "module": layer.name})
            self.layers[index] = replace(layer, name=f"{layer.name}.linear")
        return 1 / factors


def find_scale_targets(model: Any, layers: Sequence[PlannedLayer]) -> tuple[list[ScaleTarget], list[str]]:
    """Return the scale targets of the linear layers among `layers`, and the names of layers without one."""
    finder = _TargetFinder(model, layers)
    targets = [*finder.norm_targets(), *finder.layer_targets()]
    return targets, [layer.name for layer in layers if layer.multiplies and layer.module not in finder.placed]


class _TargetFinder:
    """The linear layers to be quantized, and those that already have a target."""

    def __init__(self, model: Any, layers: Sequence[PlannedLayer]) -> None:
        self.model, self.names, self.head = model, module_names(model), output_layer(model)
        self.owners: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(id(parameter), set()).add(module)
        self.coded = {
            layer.module: layer for layer in layers if layer.multiplies and self._owns_weight(layer.module)
        }
        self.placed: set[nn.Module] = set()

    def norm_targets(self) -> Iterator[ScaleTarget]:
        """Yield a target for each norm that only linear layers read."""
        for consumer in norm_consumers(self.model):
            group = norm_group(self.model, consumer) if consumer.is_foldable else None
            layers = self._claim_layers(group.linear_layers) if group else []
            if layers:
                yield ScaleTarget(layers, norm=group)

    def layer_targets(self) -> Iterator[ScaleTarget]:
        """Yield a target for each other input of layers that will be quantized."""
        inputs = [*shared_inputs(self.model), *self._pairs()]
        inputs += [SharedInput((layer.name,)) for layer in self.coded.values()]
        for shared_input in inputs:
            readers = [_input_layer(self.model.get_submodule(name)) for name in shared_input.consumers]
            producer = self._find_producer(shared_input, readers)
            layers = self._claim_layers([m for m in readers if producer is not None or m is not self.head])
            if layers:
                yield ScaleTarget(
                    layers,
                    producer=producer,
                    shared_input=shared_input
                    if producer is not None
                    else SharedInput(shared_input.consumers),
                )

    def _pairs(self) -> Iterator[SharedInput]:
        for module, names in self.names.items():
            if isinstance(module, LowRankLinear):
                yield SharedInput((f"{names[0]}.up",), f"{names[0]}.down")

    def _claim_layers(self, modules: Collection[nn.Module]) -> list[PlannedLayer]:
        layers = [self.coded[m] for m in dict.fromkeys(modules) if m in self.coded and m not in self.placed]
        self.placed |= {layer.module for layer in layers}
        return layers

    def _owns_weight(self, module: nn.Module) -> bool:
        """Return whether no other module shares the weight of `module`."""
        return all(self.owners[id(p)] == {module} for p in module.parameters(recurse=False))

    def _find_producer(self, feed: SharedInput, readers: Sequence[nn.Module]) -> nn.Linear | None:
        """Return the linear layer that always produces the input of `readers`, if it owns its weight."""
        producer = None if feed.producer is None else _output_layer(self.model.get_submodule(feed.producer))
        if not isinstance(producer, nn.Linear):
            return None
        all_of_them = (producer, *readers)
        if not all(type(m) is nn.Linear and self._owns_weight(m) for m in all_of_them):
            return None
        blocks = {tuple(sorted(_block_paths(self.names[m]))) for m in all_of_them}
        return producer if len(blocks) == 1 else None


def _block_paths(names: Sequence[str]) -> Iterator[str]:
    """Yield the block path of each name: the part up to its last number."""
    for name in names:
        parts = name.split(".")
        last_index = max((index for index, part in enumerate(parts) if part.isdigit()), default=-1)
        yield ".".join(parts[: last_index + 1])


def _input_layer(module: nn.Module) -> nn.Module:
    """Return the module that reads the input of a layer."""
    return module.down if isinstance(module, LowRankLinear) else module


def _output_layer(module: nn.Module) -> nn.Module:
    """Return the module that computes the output of a layer."""
    return module.up if isinstance(module, LowRankLinear) else module


class ScaleRunner(ABC):
    """Finds the scales of inputs, and moves them; AWQ and SmoothQuant choose the scales.

    Args:
        model: float32, in eval mode, on the CPU; changed in place with the same outputs.
        targets: where its scales go.
        layers: its planned layers.
        samples: calibration samples.
        dtype_of: returns the stored dtype of a tensor from its names.
        ctx: gets the details and warnings.

    Attributes:
        targets: all scale targets.
        edits: edits of the model.
        scales: found scales by the name of the target, float32 [K]; targets without are not changed.
    """

    def __init__(
        self,
        model: Any,
        targets: Sequence[ScaleTarget],
        layers: Sequence[PlannedLayer],
        samples: CalibrationSamples,
        dtype_of: DtypeOf,
        ctx: Context,
    ) -> None:
        self.model, self.targets = model, list(targets)
        self._samples, self._dtype_of, self._ctx = samples, dtype_of, ctx
        self._order = [layer.name for layer in layers]
        self.edits: list[Edit] = []
        self.scales: dict[str, Tensor] = {}
        self._names = {id(target): target.layers[0].name for target in self.targets}

    @abstractmethod
    def calibrate(self, targets: Sequence[ScaleTarget], part: ModelPart, *, apply: bool = True) -> None:
        """Find the scales of `targets`, and run `part` before any is applied.

        Args:
            targets: the targets in `part`, which no other target's scales change.
            part: the part of the model to run.
            apply: whether to apply the scales; otherwise the caller applies them later.

        Raises:
            InputError: inputs of a linear layer are not finite.
        """

    @abstractmethod
    def report(self) -> None:
        """Write the results to the details and warnings of the context."""

    def apply(self, targets: Sequence[ScaleTarget]) -> dict[str, Tensor]:
        """Apply the scales of `targets`; return the applied ones by name, float32 [K]."""
        return {
            name: target.apply(self.model, self.scales[name], self._dtype_of, self.edits)
            for target in targets
            if (name := self._names[id(target)]) in self.scales
        }

    def renamed(self, layers: Sequence[PlannedLayer]) -> list[PlannedLayer]:
        """Return `layers` with the names that they have after `scale`."""
        current = {layer.module: layer for target in self.targets for layer in target.layers}
        return [current.get(layer.module, layer) for layer in layers]

    def ordered_edits(self) -> list[Edit]:
        """Return the edits of layers that got a factor, in the order of the targets."""
        names = [layer.name.removesuffix(".linear") for t in self.targets for layer in t.layers]
        order = {name: index for index, name in enumerate(names)}
        # other names of a shared layer follow the layer
        return sorted(self.edits, key=lambda edit: order[str(edit.get("with", edit["module"]))])

    def _layers_to_observe(self, targets: Sequence[ScaleTarget]) -> dict[str, list[nn.Module]]:
        """Return a layer with the input of each target, by the target's name."""
        return {self._names[id(target)]: [target.layers[0].module] for target in targets}

    def _require_finite(self, magnitudes: Mapping[str, Tensor]) -> None:
        """Raise an error for inputs that are not finite; it names the first such layer in the model's order.

        Args:
            magnitudes: of the input channels, by the name of the target.
        """
        for name in sorted(magnitudes, key=self._order.index):
            if not bool(magnitudes[name].isfinite().all()):
                raise InputError(
                    f"quantize: {name}: the layer's inputs on samples of {self._samples.origin} are not"
                    " finite. The training before this step has probably diverged; lower its learning_rate.",
                    code="non-finite-activations",
                )


def norm_group(model: Any, norm: NormConsumers) -> NormGroup:
    """Return the norm of `norm` with the layers that read it."""
    readers = list(dict.fromkeys(model.get_submodule(name) for name in norm.consumers))
    layers = [layer for reader in readers for layer in _input_layers(reader)]
    return NormGroup(norm.norm, readers, layers)


def _input_layers(reader: Any) -> list[Any]:
    """Return the linear layers that multiply the input of `reader`."""
    if isinstance(reader, SharedLinear):
        return [*_input_layers(reader.shared), reader.difference.down]
    return [reader.down if isinstance(reader, LowRankLinear) else reader]


def norm_weight_offset(model: Any) -> float:
    """Return the constant that the model's norms add to their weight, 0 or 1."""
    family = family_of(model)
    return 1.0 if family is not None and family.rms_norm.adds_one_to_weight else 0.0


@torch.no_grad()
def divide_norm(model: Any, group: NormGroup, scales: Tensor, stored_dtype: torch.dtype) -> Tensor:
    """Divide the output of the norm of `group` by `scales`, float32 [K], rounded by `stored_dtype`.

    Channels whose weight is 0, or would become 0 or infinite, are not changed.

    Returns:
        The exact divisors, by which the columns of its readers were multiplied.
    """
    norm, offset = model.get_submodule(group.norm), norm_weight_offset(model)
    weight = ((norm.weight + offset) / scales - offset).to(stored_dtype).float()
    exact = (norm.weight + offset) / (weight + offset)
    finite = exact.isfinite()
    divisors: Tensor = exact.where(finite, torch.ones(()))
    norm.weight.copy_(weight.where(finite, norm.weight))
    if getattr(norm, "bias", None) is not None:
        norm.bias.div_(divisors)
    for layer in group.linear_layers:
        layer.weight.mul_(divisors)
    return divisors
