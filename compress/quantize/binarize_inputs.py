"""Elastic binarization (BiT): inputs of binary layers become one of two values with trained scale and shift.

`insert_binary_inputs` inserts the binarization before each binary layer, initialized on a few samples;
`BinaryInputTraining` trains scales and shifts in this and every later training of the model. The formulas are
in `smelt/quantization/binary_input_linear.py`.

As in the published code, a layer is initialized on its inputs with all earlier layers already binary. Here
the inputs decide between the values {0, a}, if none is negative (after a ReLU), and {-a, a}; in the published
code the position in BERT decides. AdamW moves every parameter by its learning rate, whatever the size of its
gradient; the learning rate of scale and shift is therefore relative to the initial scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.calibration.samples import input_hooks, load_calibration_samples, model_outputs
from smelt.compress.quantize.qat import QatLinear, qat_layers
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.train.extension import Objective, ParameterGroup, TrainingExtension
from smelt.compress.train.settings import TrainingSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.models.structure import Edit, replace_layer
from smelt.quantization.binary_input_linear import MIN_INPUT_SCALE, BinaryInputs
from smelt.quantization.layers import LowRankCorrectedLinear
from smelt.quantization.schemes.registry import SCHEMES

BINARIZATION_SAMPLES = 32  # for the initial scales
NO_SPEED_TEXT = "none: no runtime here multiplies bits with bits"
_DETAILS_KEY = "binary_activations"


def insert_binary_inputs(
    model: Any, edits: list[Edit], src: Artifact, settings: TrainingSettings, ctx: Context, stage: str
) -> None:
    """Insert input binarization before the binary layers of `model`, in place, if the settings ask for it.

    Layers with binary inputs are not changed.

    Args:
        model: on the CPU, in eval mode, prepared by `prepare_qat`.
        edits: the edits of the model; new ones are appended.
        src: the artifact with the tokenizer.
        settings: settings of the training.
        ctx: its `calibration` data, else `train`, are used; gets details and warnings.
        stage: the name of the stage, for messages.

    Raises:
        InputError: no layer is binary, one has a low-rank correction, or there are no samples.
    """
    if settings.qat is None or settings.qat.activations != "one-bit":
        return
    found = _binary_layers(model, stage)
    if not found:
        return
    rows = load_calibration_samples(model, src, BINARIZATION_SAMPLES, ctx, stage, padded=True)
    for name, layer in found.items():
        place: dict[str, Any] = {"op": "binary_inputs", "module": name, "signed": layer.signed}
        replace_layer(model, edits, name, layer, place)
    unseen = set(found)
    batch: dict[str, Any] = {}

    def see(name: str, x: Tensor) -> None:
        if name in unseen and x.numel():
            found[name].init_scale(x)
            unseen.discard(name)

    def batches() -> Iterator[dict[str, Any]]:
        for captured in rows.batches:
            batch.clear()
            batch.update(captured)
            yield captured

    with input_hooks(model, {name: [layer] for name, layer in found.items()}, see, batch):
        for _ in model_outputs(model, batches()):
            pass
    for edit in edits:
        if edit["op"] == "binary_inputs" and edit["module"] in found:
            edit["signed"] = found[edit["module"]].signed
    ctx.details[_DETAILS_KEY] = {"begun": len(found), "rows": rows.num_samples}
    if unseen:
        ctx.warn(
            "uncalibrated-layers",
            f"qat: activations: no sample of {rows.origin} reaches {len(unseen)} layers"
            f" ({min(unseen)}{' and others' if len(unseen) > 1 else ''}); the scales of these"
            " layers start at 1. Add samples that use them.",
        )


def _binary_layers(model: nn.Module, stage: str) -> dict[str, BinaryInputs]:
    """Return the replacements of binary layers, by the first name of each.

    Raises:
        InputError: there is no binary layer, or one cannot have binary inputs.
    """
    present = [m for m in model.modules() if isinstance(m, BinaryInputs)]
    inside = {id(part) for layer in present for part in layer.modules()}
    found: dict[int, tuple[str, BinaryInputs]] = {}
    for name, latent in qat_layers(model):
        binary = latent.quantized.matrix.scheme.binary_inputs
        if not isinstance(latent, QatLinear) or not binary or id(latent) in {*inside, *found}:
            continue
        if isinstance(model.get_submodule(name.rpartition(".")[0]), LowRankCorrectedLinear):
            raise InputError(
                f"{stage}: qat: activations: '{name}' has a low-rank correction, whose inputs would"
                " also become one-bit. Remove low_rank_correction or lora from the earlier steps.",
                code="has-low-rank-correction",
                setting="qat.activations",
            )
        found[id(latent)] = name, BinaryInputs(latent, signed=True).train(latent.training)
    if not found and not present:
        known = " or ".join(name for name, scheme in SCHEMES.items() if scheme.binary_inputs)
        raise InputError(
            f"{stage}: qat: activations: one-bit applies only to layers of scheme {known}, and the"
            f" model has none. Put quantize: {{scheme: {known}}} before this step, or remove"
            " activations: one-bit.",
            code="no-layer-of-scheme",
            setting="qat.activations",
        )
    return dict(found.values())


class BinaryInputTraining:
    """The scales and shifts of binary inputs of a model during training.

    Args:
        model: a model with binary inputs.
        settings: settings with the learning rate, relative to the initial scale; None for the default.
    """

    def __init__(self, model: nn.Module, settings: QatSettings | None) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, BinaryInputs)]
        self.first = [max(MIN_INPUT_SCALE, float(layer.scale.detach())) for layer in self.layers]
        self.rate = (settings or QatSettings()).learning_rate

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` unchanged; scales and shifts need no extra loss."""
        return objective

    def extension(self) -> TrainingExtension:
        """Return the training extension with a learning rate per layer, without weight decay."""
        groups = [
            ParameterGroup([layer.scale, layer.shift], learning_rate=self.rate * first, weight_decay=0)
            for layer, first in zip(self.layers, self.first, strict=True)
        ]
        return TrainingExtension(groups=groups)

    def finalize(self, ctx: Context) -> None:
        """Report the changes of scales and shifts to `ctx`, and that there is no speedup."""
        scales = torch.stack([layer.scale.detach().clamp(min=MIN_INPUT_SCALE) for layer in self.layers])
        shifts = [
            layer.shift.detach().abs().mean() / scale
            for layer, scale in zip(self.layers, scales, strict=True)
        ]
        ctx.details[_DETAILS_KEY] = {
            **ctx.details.get(_DETAILS_KEY, {}),
            "layers": len(self.layers),
            "signed": sum(layer.signed for layer in self.layers),
            "mean_change": round(float((scales / torch.tensor(self.first)).log().abs().mean()), 4),
            "mean_shift": round(float(torch.stack(shifts).mean()), 4),
            "speed_gained": NO_SPEED_TEXT,
        }


def has_binary_inputs(model: nn.Module) -> bool:
    """Return whether a layer of `model` has binary inputs."""
    return any(isinstance(module, BinaryInputs) for module in model.modules())
