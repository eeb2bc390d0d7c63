"""Training through low-rank adapters.

Hu et al. 2021, LoRA, arXiv:2106.09685: W + alpha / r * B A, with W as it is. The adapters are peft's. Before
anything is stored they become part of float weights. Of a layer whose zeros are to stay, the sum has W's
zeros, while it trains as when it is merged.

Beside codes (Dettmers et al. 2023, QLoRA, arXiv:2305.14314) they stay what they are, a low-rank pair beside
the layer (runtime/layers/adapted.py says why).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.train.settings import PEFT, LoraSettings
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.packages import require
from smelt.families.walk import blocks_of, head_of
from smelt.runtime.layers.adapted import AdaptedLinear, adapted
from smelt.runtime.layers.binary_inputs import BinaryInputs
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized import QuantizedLinear
from smelt.runtime.layers.scaled import ScaledLinear
from smelt.runtime.layers.shared import parts_of
from smelt.runtime.models.structure import Edit, keeps_zeros, names_of, replace_layer, replace_module
from smelt.runtime.schemes.parts.bits_and_bytes import quietly

_MOMENTS = 12  # bytes a trained weight: a gradient and AdamW's two moments in float32


def targets_of(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the linear layers that get adapters, each by its first name; of those made of several all parts.

    Raises:
        InputError: no layer of the model is meant, or one is of a kind that has no place for an adapter.
    """
    chosen: dict[str, None] = {}
    for block in blocks_of(model):
        feed = block.feed_forward
        if "attention" in targets:
            chosen |= {name: None for part in block.attentions for name in part.products}
        if "ffn" in targets and feed is not None:
            chosen |= dict.fromkeys(feed.products)
    if not chosen:
        raise InputError(
            f"lora: smelt does not know the layers of a {model.config.model_type} model."
            " Leave lora out, which trains all weights.",
            code="unsupported-family",
            setting="lora",
        )
    found: dict[str, None] = {}
    names = names_of(model)
    for name in chosen:
        for module in map(_coded, parts_of(model.get_submodule(name)).values()):
            if type(module) is not nn.Linear and not isinstance(module, QuantizedLinear | AdaptedLinear):
                raise InputError(
                    f"lora: '{name}' is a {type(module).__name__}, which has no gradient for an adapter."
                    " Leave it out with targets, or leave lora out, which trains all weights.",
                    code="unsupported-layer",
                    setting="lora",
                )
            found[names[module][0]] = None
    return list(found)


def _coded(module: nn.Module) -> nn.Module:
    """Return the layer behind the factors of its inputs, or what makes them binary, where it has some."""
    if isinstance(module, BinaryInputs):
        return module.coded
    return module.linear if isinstance(module, ScaledLinear) else module


class BesideCodes(nn.Module):
    """A layer of codes and the adapter that trains beside it, begun as peft begins those of float layers."""

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(self, base: QuantizedLinear | AdaptedLinear, settings: LoraSettings) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, settings.alpha / settings.rank
        # torch begins a Linear as peft begins A (He et al. 2015, with a = 5 ** 0.5); B begins with zeros
        self.pair = LowRankLinear(base.in_features, base.out_features, settings.rank, bias=False)
        nn.init.zeros_(self.pair.up.weight)

    def get_base_layer(self) -> nn.Module:
        """Return the layer of codes, by peft's word."""
        return self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.base_layer(x) + self.scaling * self.pair(x)
        return out

    def settled(self) -> AdaptedLinear:
        """Return the layer with what the adapter learned, added to one that was there before."""
        base: nn.Module = self.base_layer
        down, up = self.pair.down.weight.detach(), self.scaling * self.pair.up.weight.detach()
        if isinstance(base, AdaptedLinear):
            before = base.adapter
            down, up = torch.cat([before.down.weight, down]), torch.cat([before.up.weight, up], dim=1)
            base = base.coded
        assert isinstance(base, QuantizedLinear)
        rows, columns = len(up), down.shape[1]
        if len(down) > min(rows, columns):  # no matrix has more ranks than its smaller side
            one = torch.eye(min(rows, columns), device=up.device)
            down, up = (up @ down, one) if rows < columns else (one, up @ down)
        return adapted(base, up, down).train(self.training)


def _inject(model: Any, names: Sequence[str], settings: LoraSettings) -> None:
    """Put adapters on the layers `names`, peft's on float ones; nothing else trains afterwards."""
    coded = [n for n in names if isinstance(model.get_submodule(n), QuantizedLinear | AdaptedLinear)]
    floats = [name for name in names if name not in coded]
    model.requires_grad_(False)
    if floats:
        with quietly():  # peft imports bitsandbytes where it is
            from peft import LoraConfig, inject_adapter_in_model

            config = LoraConfig(
                r=settings.rank, lora_alpha=settings.alpha, target_modules=floats, bias="none"
            )
            inject_adapter_in_model(config, model)
    for name in coded:
        base = model.get_submodule(name)
        replace_module(model, name, BesideCodes(base, settings).train(base.training))


def _floats(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `module` that train: codes, and what they multiply, stay as they are."""
    coded = {id(p) for m in module.modules() if isinstance(m, Matrix) for p in m.parameters()}
    coded |= {id(p) for m in module.modules() if isinstance(m, BinaryInputs) for p in (m.scale, m.shift)}
    return [p for p in module.parameters() if id(p) not in coded]


class Adapters:
    """Adapters on the layers of one model, while it trains."""

    def __init__(self, model: Any, settings: LoraSettings, edits: list[Edit] | None = None) -> None:
        """Put them beside the layers; nothing else trains but the head of a classifier, as in peft.

        edits: the structure of `model`, which says of adapters that stay beside codes.
        """
        require("peft", PEFT, "lora: the adapters are peft's")
        self.model, self.settings = model, settings
        self.edits: list[Edit] = [] if edits is None else edits
        self.frozen = [p for p in model.parameters() if p.requires_grad]
        names = names_of(model)
        self.places = {n: names[model.get_submodule(n)] for n in targets_of(model, settings.targets)}
        coded = {id(m): len(m.codes) * m.width for m in model.modules() if isinstance(m, Matrix)}
        self.whole = sum(p.numel() for p in self.frozen) + sum(coded.values())
        _inject(model, list(self.places), settings)
        self.layers: dict[str, Any] = {}
        for name, others in self.places.items():
            self.layers[name] = model.get_submodule(name)
            base = self.layers[name].get_base_layer()
            if isinstance(base, nn.Linear) and keeps_zeros(base):
                self.layers[name].forward = partial(_between_zeros, self.layers[name])
            self._put(others, self.layers[name])  # a layer in several places has one adapter
        if any("Classification" in str(name) for name in model.config.architectures or ()):
            for name in head_of(model):
                for parameter in _floats(model.get_submodule(name)):
                    parameter.requires_grad_(True)

    def details(self) -> dict[str, int]:
        """Return how many weights train, and what that takes beside them, for the report."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        coded = sum(isinstance(layer, BesideCodes) for layer in self.layers.values())
        return {
            "rank": self.settings.rank,
            "layers": len(self.layers),
            **({"beside_codes": coded} if coded else {}),
            "trained_weights": trained,
            "optimizer_bytes": _MOMENTS * trained,
            "optimizer_bytes_of_all_weights": _MOMENTS * self.whole,
        }

    def warnings(self) -> list[Message]:
        """Say where adapters have more weights than the layers beside them, so that nothing is saved."""
        bases = {name: layer.get_base_layer() for name, layer in self.layers.items()}
        shapes = {name: (base.out_features, base.in_features) for name, base in bases.items()}
        rank = self.settings.rank
        wide = [name for name, (rows, columns) in shapes.items() if rank * (rows + columns) >= rows * columns]
        if not wide:
            return []
        least = min(math.ceil(rows * columns / (rows + columns)) for rows, columns in shapes.values())
        less = f"; below {least} every adapter is smaller than its layer" if least > 1 else ""
        return [
            warning(
                "no-size-reduction",
                f"lora: with rank {rank} the adapters of {len(wide)} of {len(shapes)} layers have at least as"
                f" many weights as the layers ({', '.join(wide[:3])}){less}.",
                setting="lora.rank",
            )
        ]

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Let the model meanwhile be as it would be stored: the adapters in the weights, or beside codes."""
        floats = {
            name: layer.get_base_layer()
            for name, layer in self.layers.items()
            if not isinstance(layer, BesideCodes)
        }
        kept = {name: base.weight.detach().clone() for name, base in floats.items()}
        edits = list(self.edits)
        self._merge()
        try:
            yield
        finally:
            self.edits[:] = edits
            for name, layer in self.layers.items():
                if name in kept:
                    floats[name].weight.data.copy_(kept[name])
                self._put(self.places[name], layer)

    def settle(self) -> None:
        """Leave the model with the adapters in its weights, which can be trained again, or beside codes."""
        self._merge()
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        if hasattr(self.model, "peft_config"):  # what peft leaves behind
            del self.model.peft_config

    def _merge(self) -> None:
        with torch.no_grad():
            for name, layer in self.layers.items():
                if isinstance(layer, BesideCodes):
                    new = layer.settled()
                    edit = {"op": "adapter", "module": name, "rank": new.adapter.rank}
                    replace_layer(self.model, self.edits, name, new, edit)
                    continue
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
