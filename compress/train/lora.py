"""Training through low-rank adapters, which become part of the weights before anything is stored.

Hu et al. 2021, LoRA, arXiv:2106.09685: W + alpha / r * B A, with W as it is. The adapters are peft's. Of a
layer whose zeros are to stay, the sum has W's zeros, while it trains as when it is merged.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.train.settings import PEFT, LoraSettings
from smelt.core.errors import InputError, MissingDependencyError
from smelt.families.walk import blocks_of, head_of
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.models.structure import keeps_zeros, names_of, replace_module

_MOMENTS = 12  # bytes a trained weight: a gradient and AdamW's two moments in float32


def require_peft() -> None:
    """Require a peft that is new enough.

    Raises:
        MissingDependencyError: there is none, or an older one.
    """
    try:
        found = version("peft")
    except PackageNotFoundError:
        found = None
    if found is None or _number(found) < _number(PEFT):
        what = "it is not installed" if found is None else f"{found} is installed"
        raise MissingDependencyError(
            f"lora: the adapters are peft's, {PEFT} or later, and {what}. pip install 'peft>={PEFT}'"
        )


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


def targets_of(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the linear layers that get adapters, each by its first name; of a low-rank pair both halves.

    Raises:
        InputError: no layer of the model is meant, or one has integer codes.
    """
    chosen: dict[str, None] = {}
    for block in blocks_of(model):
        if "attention" in targets:
            chosen |= {name: None for part in block.attentions for name in part.products}
        if "ffn" in targets:
            chosen |= dict.fromkeys(block.feed_forward.products)
    if not chosen:
        raise InputError(
            f"lora: smelt does not know the layers of a {model.config.model_type} model."
            " Leave lora out, which trains all weights."
        )
    found: dict[str, None] = {}
    names = names_of(model)
    for name in chosen:
        module = model.get_submodule(name)
        if isinstance(module, LowRankLinear):
            found |= {names[half][0]: None for half in (module.down, module.up)}
        elif type(module) is nn.Linear:
            found[names[module][0]] = None
        else:
            raise InputError(
                f"lora: '{name}' is a {type(module).__name__}: adapters beside integer codes would be lost in"
                " them when they are merged. Put the step before 'quantize', or leave lora out, which trains"
                " through the codes."
            )
    return list(found)


class Adapters:
    """Adapters on the layers of one model, while it trains."""

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        """Put them beside the layers; nothing else trains but the head of a classifier, as in peft."""
        require_peft()
        from peft import LoraConfig, inject_adapter_in_model

        self.model, self.settings = model, settings
        self.frozen = [p for p in model.parameters() if p.requires_grad]
        names = names_of(model)
        self.places = {n: names[model.get_submodule(n)] for n in targets_of(model, settings.targets)}
        self.whole = sum(p.numel() for p in self.frozen)
        config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules=list(self.places), bias="none"
        )
        inject_adapter_in_model(config, model)
        self.layers: dict[str, Any] = {}
        for name, others in self.places.items():
            self.layers[name] = model.get_submodule(name)
            if keeps_zeros(self.layers[name].get_base_layer()):
                self.layers[name].forward = partial(_between_zeros, self.layers[name])
            self._put(others, self.layers[name])  # a layer in several places has one adapter
        if any("Classification" in str(name) for name in model.config.architectures or ()):
            for name in head_of(model):
                model.get_submodule(name).requires_grad_(True)

    def facts(self) -> dict[str, int]:
        """Return how many weights train, and what that takes beside them, for the report."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return {
            "rank": self.settings.rank,
            "layers": len(self.layers),
            "trained_weights": trained,
            "optimizer_bytes": _MOMENTS * trained,
            "optimizer_bytes_of_all_weights": _MOMENTS * self.whole,
        }

    def warnings(self) -> list[str]:
        """Say where adapters have more weights than the layers beside them, so that nothing is saved."""
        shapes = {name: layer.get_base_layer().weight.shape for name, layer in self.layers.items()}
        rank = self.settings.rank
        wide = [name for name, (rows, columns) in shapes.items() if rank * (rows + columns) >= rows * columns]
        if not wide:
            return []
        least = min(math.ceil(rows * columns / (rows + columns)) for rows, columns in shapes.values())
        less = f"; below {least} every adapter is smaller than its layer" if least > 1 else ""
        return [
            f"lora: rank {rank} gives {len(wide)} of {len(shapes)} layers adapters that have no fewer weights"
            f" than they ({', '.join(wide[:3])}), so that nothing is saved there{less}"
        ]

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Let the model meanwhile be as it would be stored: the adapters in the weights."""
        kept = {name: layer.get_base_layer().weight.detach().clone() for name, layer in self.layers.items()}
        self._merge()
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.get_base_layer().weight.data.copy_(kept[name])
                self._put(self.places[name], layer)

    def settle(self) -> None:
        """Leave the model with the adapters in its weights, which all can be trained again."""
        self._merge()
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        del self.model.peft_config  # what peft leaves behind

    def _merge(self) -> None:
        with torch.no_grad():
            for name, layer in self.layers.items():
                base = layer.get_base_layer()
                base.weight.data += _delta(layer).to(base.weight)
                self._put(self.places[name], base)

    def _put(self, names: Sequence[str], module: nn.Module) -> None:
        for name in names:
            if self.model.get_submodule(name) is not module:
                replace_module(self.model, name, module)


def _delta(layer: Any) -> Tensor:
    """Return alpha / r * B A, float32 [out, in]; 0 where the zeros of the weight are to stay."""
    found: Tensor = layer.get_delta_weight("default")
    base = layer.get_base_layer()
    return found * (base.weight != 0) if keeps_zeros(base) else found


def _between_zeros(layer: Any, x: Tensor) -> Tensor:
    """Return what a layer with zeros and its adapter make of `x`: peft's own sum would fill them."""
    base = layer.get_base_layer()
    return F.linear(x, base.weight + _delta(layer), base.bias)
