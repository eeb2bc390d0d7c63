"""Elastic binarization (BiT): what binary layers are fed becomes one of two values, whose place trains.

`binarize_first` puts the step before each binary layer, begun on a few rows; `LearnedInputs` trains scales
and shifts, then and in every later training of the model. The formulas stand in
`runtime/layers/binary_inputs.py`.

As the published code has it, a layer begins from what it is fed when those before it are binary already. Its
inputs decide there which two values it has: {0, a} where none of them is below 0, as behind a ReLU, else
{-a, a}; in the published code the place in BERT decides. AdamW moves every parameter by its learning rate,
whatever the size of its gradient: that of scale and shift is therefore in parts of the first scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.calibration.observe import watched
from smelt.compress.calibration.rows import calibration_rows, outputs
from smelt.compress.quantize.through_codes import LatentLinear, latents_of
from smelt.compress.quantize.training.settings import QatSettings
from smelt.compress.train.extension import Extension, Group
from smelt.compress.train.settings import TrainingSettings
from smelt.compress.train.terms import Objective
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.layers.adapted import AdaptedLinear
from smelt.runtime.layers.binary_inputs import LEAST, BinaryInputs
from smelt.runtime.models.structure import Edit, replace_layer
from smelt.runtime.schemes.registry import SCHEMES

ROWS = 32  # that scales begin from
NO_SPEED = "none: no runtime here multiplies bits with bits"
_FACTS = "binary_activations"


def binarize_first(
    model: Any, edits: list[Edit], src: Artifact, settings: TrainingSettings, ctx: Context, stage: str
) -> None:
    """Put a step of two values before the binary layers of `model`, in place, where the settings ask for it.

    Layers that have one keep it as it is.

    Args:
        model: on the CPU, in eval mode, with float weights behind its codes (`put_latent`).
        edits: its structure, which gets the steps.
        src: where the tokenizer lies.
        settings: of the training.
        ctx: its rows of `calibration`, else `train`, are read; gets details and warnings.
        stage: the stage's word, for messages.

    Raises:
        InputError: no layer is binary, or one has a low-rank pair beside it; or there are no rows.
    """
    if settings.qat is None or settings.qat.activations != "one-bit":
        return
    found = _to_binarize(model, stage)
    if not found:
        return
    rows = calibration_rows(model, src, ROWS, ctx, stage, padded=True)
    for name, layer in found.items():
        place: dict[str, Any] = {"op": "binary_inputs", "module": name, "signed": layer.signed}
        replace_layer(model, edits, name, layer, place)
    unseen = set(found)
    batch: dict[str, Any] = {}

    def see(name: str, x: Tensor) -> None:
        if name in unseen and x.numel():
            found[name].begin(x)
            unseen.discard(name)

    def batches() -> Iterator[dict[str, Any]]:
        for one in rows.batches:
            batch.clear()
            batch.update(one)
            yield one

    with watched(model, {name: [layer] for name, layer in found.items()}, see, batch):
        for _ in outputs(model, batches()):
            pass
    for edit in edits:
        if edit["op"] == "binary_inputs" and edit["module"] in found:
            edit["signed"] = found[edit["module"]].signed
    ctx.details[_FACTS] = {"begun": len(found), "rows": rows.rows}
    if unseen:
        ctx.warn(
            "uncalibrated-layers",
            f"qat: activations: no sample of {rows.origin} reaches {len(unseen)} layers"
            f" ({min(unseen)}{' and others' if len(unseen) > 1 else ''}); their scale starts as 1.",
        )


def _to_binarize(model: nn.Module, stage: str) -> dict[str, BinaryInputs]:
    """Return what will stand in the places of binary layers, by the first name of each.

    Raises:
        InputError: there is no binary layer, or one that cannot have it.
    """
    there = [m for m in model.modules() if isinstance(m, BinaryInputs)]
    inside = {id(part) for layer in there for part in layer.modules()}
    found: dict[int, tuple[str, BinaryInputs]] = {}
    for name, latent in latents_of(model):
        binary = latent.home.matrix.scheme.binary_inputs
        if not isinstance(latent, LatentLinear) or not binary or id(latent) in {*inside, *found}:
            continue
        if isinstance(model.get_submodule(name.rpartition(".")[0]), AdaptedLinear):
            raise InputError(
                f"{stage}: qat: activations: '{name}' has a low-rank pair beside its codes, which is fed"
                " what they are. Leave low_rank_correction or lora out before this step.",
                code="has-low-rank-correction",
                setting="qat.activations",
            )
        found[id(latent)] = name, BinaryInputs(latent, signed=True).train(latent.training)
    if not found and not there:
        known = " or ".join(name for name, scheme in SCHEMES.items() if scheme.binary_inputs)
        raise InputError(
            f"{stage}: qat: activations: one-bit is for layers of scheme {known}, and the model has none."
            f" Put quantize: {{scheme: {known}}} before this step, or leave it out.",
            code="no-layer-of-scheme",
            setting="qat.activations",
        )
    return dict(found.values())


class LearnedInputs:
    """The scales and shifts of binary inputs of one model while it trains.

    Args:
        model: with such layers.
        settings: the learning rate, in parts of the first scale; None for the default one.
    """

    def __init__(self, model: nn.Module, settings: QatSettings | None) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, BinaryInputs)]
        self.first = [max(LEAST, float(layer.scale.detach())) for layer in self.layers]
        self.rate = (settings or QatSettings()).learning_rate

    def objective(self, objective: Objective) -> Objective:
        """Return `objective`: the gradients of scales and shifts are those of any loss."""
        return objective

    def extension(self) -> Extension:
        """Return the learning rate of each layer's, which no weight decay draws to 0."""
        groups = [
            Group([layer.scale, layer.shift], learning_rate=self.rate * first, weight_decay=0)
            for layer, first in zip(self.layers, self.first, strict=True)
        ]
        return Extension(groups=groups)

    def settle(self, ctx: Context) -> None:
        """Say in `ctx` how far scales and shifts went, and that nothing is faster."""
        scales = torch.stack([layer.scale.detach().clamp(min=LEAST) for layer in self.layers])
        shifts = [
            layer.shift.detach().abs().mean() / scale
            for layer, scale in zip(self.layers, scales, strict=True)
        ]
        ctx.details[_FACTS] = {
            **ctx.details.get(_FACTS, {}),
            "layers": len(self.layers),
            "signed": sum(layer.signed for layer in self.layers),
            "mean_change": round(float((scales / torch.tensor(self.first)).log().abs().mean()), 4),
            "mean_shift": round(float(torch.stack(shifts).mean()), 4),
            "speed_gained": NO_SPEED,
        }


def with_binary_inputs(model: nn.Module) -> bool:
    """Say whether a layer of `model` has binary inputs."""
    return any(isinstance(module, BinaryInputs) for module in model.modules())
