"""Training of low-rank adapters.

Hu et al. 2021, LoRA, arXiv:2106.09685: W + alpha / r * B A, with W frozen. The adapters are peft's, also
with the scale of rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) and the row lengths of DoRA (Liu et al. 2024,
arXiv:2402.09353). They are merged into float weights before storing. For a sparse layer the sum keeps the
zeros of W, during training and after merging.

With quantized weights (Dettmers et al. 2023, QLoRA, arXiv:2305.14314) they are stored as a low-rank
correction of the layer (see smelt/quantization/layers.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.system import require_package
from smelt.models.edits import Edit, is_masked, module_names, replace_layer, replace_module
from smelt.models.families.registry import blocks_of, output_modules
from smelt.models.layers import (
    LowRankCorrectedLinear,
    LowRankLinear,
    ScaledLinear,
    component_layers,
    with_low_rank_correction,
)
from smelt.quantization.layers import QuantizedLinear, QuantizedMatrix
from smelt.quantization.schemes.bitsandbytes import silence_bitsandbytes
from smelt.training.settings import PEFT_VERSION, LoraSettings

_PEFT_PREFIX = "base_model.model."  # of names in peft's files
_BYTES_PER_WEIGHT = 12  # bytes a trained weight: a gradient and AdamW's two moments in float32


def find_lora_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the linear layers that get adapters, each by its first name; of composed ones all parts.

    Raises:
        InputError: no layer of the model is selected, or one has a type that cannot have an adapter.
    """
    candidate_names: dict[str, None] = {}
    for block in blocks_of(model):
        if "attention" in targets:
            candidate_names |= {
                name: None for layer_part in block.attentions for name in layer_part.linear_layers
            }
        if "ffn" in targets:
            candidate_names |= {name: None for part in block.feed_forwards for name in part.linear_layers}
    if not candidate_names:
        raise InputError(
            f"lora: {model.config.model_type} models are not supported. Remove lora to train all weights.",
            code="unsupported-family",
            setting="lora",
        )
    layer_names: dict[str, None] = {}
    names = module_names(model)
    for name in candidate_names:
        for module in map(_inner_layer, component_layers(model.get_submodule(name)).values()):
            if type(module) is not nn.Linear and not isinstance(
                module, QuantizedLinear | LowRankCorrectedLinear
            ):
                raise InputError(
                    f"lora: '{name}' is a {type(module).__name__}, which does not support adapters."
                    " Exclude it with targets, or remove lora to train all weights.",
                    code="unsupported-layer",
                    setting="lora",
                )
            layer_names[names[module][0]] = None
    return list(layer_names)


def _inner_layer(module: nn.Module) -> nn.Module:
    """Return the inner layer, without the scaling of its inputs, if any."""
    return module.linear if isinstance(module, ScaledLinear) else module


class QuantizedLoraLinear(nn.Module):
    """A quantized linear layer and its adapter, initialized as peft does for float layers."""

    weight = None  # T5 reads the dtype of a layer's weight, and accepts None

    def __init__(self, base: QuantizedLinear | LowRankCorrectedLinear, settings: LoraSettings) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = settings.alpha / (settings.r**0.5 if settings.use_rslora else settings.r)
        # torch initializes a Linear as peft initializes A (He et al. 2015, a = 5 ** 0.5); B is zero
        self.pair = LowRankLinear(base.in_features, base.out_features, settings.r, bias=False)
        nn.init.zeros_(self.pair.up.weight)

    def get_base_layer(self) -> nn.Module:
        """Return the quantized layer; the name is peft's."""
        return self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.base_layer(x) + self.scaling * self.pair(x)
        return out

    def to_adapted(self) -> LowRankCorrectedLinear:
        """Return the layer with the adapter as low-rank correction, added to an earlier one."""
        base: nn.Module = self.base_layer
        down_weight, up_weight = self.pair.down.weight.detach(), self.scaling * self.pair.up.weight.detach()
        if isinstance(base, LowRankCorrectedLinear):
            before = base.adapter
            down_weight, up_weight = (
                torch.cat([before.down.weight, down_weight]),
                torch.cat([before.up.weight, up_weight], dim=1),
            )
            base = base.coded
        assert isinstance(base, QuantizedLinear)
        out_features, columns = len(up_weight), down_weight.shape[1]
        if len(down_weight) > min(out_features, columns):  # the rank is at most the smaller side
            identity = torch.eye(min(out_features, columns), device=up_weight.device)
            down_weight, up_weight = (
                (up_weight @ down_weight, identity)
                if out_features < columns
                else (identity, up_weight @ down_weight)
            )
        return with_low_rank_correction(base, up_weight, down_weight).train(self.training)


def _peft_config(layer_names: Sequence[str], settings: LoraSettings) -> Any:
    """Return peft's `LoraConfig` of adapters of these layers."""
    with silence_bitsandbytes():  # peft imports bitsandbytes if it is installed
        from peft import LoraConfig

    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        target_modules=list(layer_names),
        bias="none",
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
    )


def _inject_adapters(model: Any, names: Sequence[str], settings: LoraSettings) -> None:
    """Add adapters to the layers `names`, peft's to float ones; all other weights are frozen.

    Raises:
        InputError: see `_require_supported_layers`.
    """
    quantized_names = [
        n for n in names if isinstance(model.get_submodule(n), QuantizedLinear | LowRankCorrectedLinear)
    ]
    floats = [name for name in names if name not in quantized_names]
    _require_supported_layers(model, quantized_names, floats, settings)
    model.requires_grad_(False)
    if floats:
        config = _peft_config(floats, settings)
        from peft import inject_adapter_in_model

        inject_adapter_in_model(config, model)
    for name in quantized_names:
        base = model.get_submodule(name)
        replace_module(model, name, QuantizedLoraLinear(base, settings).train(base.training))


def _require_supported_layers(
    model: Any, quantized: Sequence[str], floats: Sequence[str], settings: LoraSettings
) -> None:
    """Require layers that DoRA can scale, and that peft computes from a saved adapter as smelt does.

    Raises:
        InputError: `unsupported-layer`: DoRA of a quantized layer, or of a row of zeros, which has no
            direction; DoRA or a saved adapter of a sparse layer, whose zeros peft would fill.
    """
    sparse = [name for name in floats if is_masked(model.get_submodule(name))]
    weights = ((name, model.get_submodule(name).weight.detach()) for name in floats)
    problems = []
    if settings.use_dora:
        zero_rows = [name for name, weight in weights if bool((weight == 0).all(dim=1).any())]
        problems += [("use_dora", f"'{name}' is quantized") for name in quantized[:1]]
        problems += [("use_dora", f"'{name}' is sparse") for name in sparse[:1]]
        problems += [("use_dora", f"'{name}' has a row of zeros") for name in zero_rows[:1]]
    if settings.save_adapter:
        problems += [
            ("save_adapter", f"'{name}' is sparse, and peft would fill its zeros") for name in sparse[:1]
        ]
    if problems:
        setting, reason = problems[0]
        raise InputError(
            f"lora: {setting} is not supported: {reason}. Remove {setting}.",
            code="unsupported-layer",
            setting=f"lora.{setting}",
        )


def _trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of `module`; quantized weights and scales are frozen."""
    quantized_ids = {
        id(p) for m in module.modules() if isinstance(m, QuantizedMatrix) for p in m.parameters()
    }
    return [p for p in module.parameters() if id(p) not in quantized_ids]


class LoraAdapters:
    """Adapters of the layers of one model during training."""

    def __init__(self, model: Any, settings: LoraSettings, edits: list[Edit] | None = None) -> None:
        """Add adapters to the layers; all else is frozen except the output layer of a classifier, as in peft.

        edits: the edits of `model`, to which low-rank corrections of quantized layers are added.
        """
        require_package("peft", PEFT_VERSION, "lora: the adapters are peft's")
        self.model, self.settings = model, settings
        self.edits: list[Edit] = [] if edits is None else edits
        self.frozen = [p for p in model.parameters() if p.requires_grad]
        names = module_names(model)
        self.places = {n: names[model.get_submodule(n)] for n in find_lora_layers(model, settings.targets)}
        quantized_counts = {
            id(m): len(m.codes) * m.width for m in model.modules() if isinstance(m, QuantizedMatrix)
        }
        self.whole = sum(p.numel() for p in self.frozen) + sum(quantized_counts.values())
        _inject_adapters(model, list(self.places), settings)
        self.layers: dict[str, Any] = {}
        for name, same_layer in self.places.items():
            self.layers[name] = model.get_submodule(name)
            base = self.layers[name].get_base_layer()
            if isinstance(base, nn.Linear) and is_masked(base):
                self.layers[name].forward = partial(_masked_forward, self.layers[name])
            self._replace_layers(same_layer, self.layers[name])  # a layer with several names has one adapter
        is_classifier = any("Classification" in str(name) for name in model.config.architectures or ())
        self.head_names = output_modules(model) if is_classifier else []
        for name in self.head_names:
            for parameter in _trainable_parameters(model.get_submodule(name)):
                parameter.requires_grad_(True)

    def details(self) -> dict[str, int]:
        """Return the number of trained weights and the memory of their training, for the report."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        num_quantized = sum(isinstance(layer, QuantizedLoraLinear) for layer in self.layers.values())
        return {
            "rank": self.settings.r,
            "layers": len(self.layers),
            **({"beside_codes": num_quantized} if num_quantized else {}),
            "trained_weights": trained,
            "optimizer_bytes": _BYTES_PER_WEIGHT * trained,
            "optimizer_bytes_of_all_weights": _BYTES_PER_WEIGHT * self.whole,
        }

    def warnings(self) -> list[Message]:
        """Return warnings where adapters have more weights than their layers, so that nothing is saved."""
        bases = {name: layer.get_base_layer() for name, layer in self.layers.items()}
        shapes = {name: (base.out_features, base.in_features) for name, base in bases.items()}
        rank = self.settings.r
        wide = [
            name
            for name, (out_features, columns) in shapes.items()
            if rank * (out_features + columns) >= out_features * columns
        ]
        if not wide:
            return []
        max_rank = min(
            math.ceil(out_features * columns / (out_features + columns))
            for out_features, columns in shapes.values()
        )
        rank_hint = (
            f". Set r below {max_rank} to make every adapter smaller than its layer" if max_rank > 1 else ""
        )
        return [
            warning(
                "no-size-reduction",
                f"lora: with r: {rank} the adapters of {len(wide)} of {len(shapes)} layers have at least as"
                f" many weights as the layers ({', '.join(wide[:3])}){rank_hint}.",
                setting="lora.r",
            )
        ]

    @contextlib.contextmanager
    def as_stored(self) -> Iterator[None]:
        """Convert the model to its stored form inside the context, with the adapters merged."""
        floats = {
            name: layer.get_base_layer()
            for name, layer in self.layers.items()
            if not isinstance(layer, QuantizedLoraLinear)
        }
        original_weights = {name: base.weight.detach().clone() for name, base in floats.items()}
        edits = list(self.edits)
        self._merge()
        try:
            yield
        finally:
            self.edits[:] = edits
            for name, layer in self.layers.items():
                if name in original_weights:
                    if self.settings.use_dora:
                        layer.unmerge()
                    floats[name].weight.data.copy_(original_weights[name])
                self._replace_layers(self.places[name], layer)

    def save(self, folder: Path) -> None:
        """Write the adapters, and a classifier's output layer, as `PeftModel.from_pretrained` reads them.

        Args:
            folder: is created.
        """
        tensors: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            parts = _adapter_tensors(layer)
            tensors |= {f"{_PEFT_PREFIX}{name}.{part}": tensor for part, tensor in parts.items()}
        for name in self.head_names:
            head_tensors = self.model.get_submodule(name).state_dict()
            tensors |= {f"{_PEFT_PREFIX}{name}.{part}": tensor for part, tensor in head_tensors.items()}
        config = _peft_config(list(self.layers), self.settings)
        config.modules_to_save = list(self.head_names) or None
        config.inference_mode = True
        config.save_pretrained(folder)
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "adapter_model.safetensors", {"format": "pt"})

    def finalize(self) -> None:
        """Merge the adapters into trainable weights, or convert them to low-rank corrections."""
        self._merge()
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        if hasattr(self.model, "peft_config"):  # left by peft
            del self.model.peft_config

    def _merge(self) -> None:
        with torch.no_grad():
            for name, layer in self.layers.items():
                if isinstance(layer, QuantizedLoraLinear):
                    new = layer.to_adapted()
                    edit = {"op": "adapter", "module": name, "rank": new.adapter.rank}
                    replace_layer(self.model, self.edits, name, new, edit)
                    continue
                base = layer.get_base_layer()
                if self.settings.use_dora:
                    layer.merge()
                else:
                    base.weight.data += _adapter_delta(layer).to(base.weight)
                self._replace_layers(self.places[name], base)

    def _replace_layers(self, names: Sequence[str], module: nn.Module) -> None:
        for name in names:
            if self.model.get_submodule(name) is not module:
                replace_module(self.model, name, module)


def _adapter_tensors(layer: Any) -> dict[str, Tensor]:
    """Return an adapter's weights by their names in peft's files: A [r, in], B [out, r], lengths [out]."""
    if isinstance(layer, QuantizedLoraLinear):
        return {"lora_A.weight": layer.pair.down.weight, "lora_B.weight": layer.pair.up.weight}
    tensors = {
        "lora_A.weight": layer.lora_A["default"].weight,
        "lora_B.weight": layer.lora_B["default"].weight,
    }
    if "default" in layer.lora_magnitude_vector:
        tensors["lora_magnitude_vector"] = layer.lora_magnitude_vector["default"].weight
    return tensors


def _adapter_delta(layer: Any) -> Tensor:
    """Return alpha / r * B A, float32 [out, in]; 0 at the zeros of a sparse weight."""
    delta: Tensor = layer.get_delta_weight("default")
    base = layer.get_base_layer()
    return delta * (base.weight != 0) if is_masked(base) else delta


def _masked_forward(layer: Any, x: Tensor) -> Tensor:
    """Return the output of a sparse layer with its adapter; peft's own sum would fill the zeros."""
    base = layer.get_base_layer()
    return F.linear(x, base.weight + _adapter_delta(layer), base.bias)
