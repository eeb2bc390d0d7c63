"""Learned rotations: the quantized model becomes as close to the float model as possible.

Liu et al. 2024, SpinQuant: LLM Quantization with Learned Rotations, arXiv:2405.16406, section 3.2, and its
code (facebookresearch/SpinQuant, optimize_rotation.py): a rotation of the hidden states and one of the values
of each attention start from Hadamard matrices, and minimize the loss of the quantized model, whose weights
are constants. Matrices stay orthogonal by the Cayley transform, Q (I + A/2) (I - A/2)^-1 with a
skew-symmetric A (Li et al. 2020, arXiv:2002.01113).

Differences from the code (measured in docs/measurements/rotations.md#learned-rotations):

- In an update, weights get uniform noise of one step of their scale instead of rounding (Defossez et al.
  2021, arXiv:2104.09987), with gradients for the scale: a rotation that makes the largest weight of a group
  smaller makes the noise smaller. Gradients straight through rounding, as in the code, did not reduce the
  loss. From time to time the model is rounded; the best matrices so far are kept.
- A is a parameter, from 0 on, which Adam updates (torch's parametrization `orthogonal`); the code takes a
  step of SGD along a Cayley transform from each matrix to the next.
- The loss is the divergence from the float model, which needs no labels.
- Activations are not rounded: int8 activations change outputs much less than few-bit weights.

Shapes: c = channels of a rotation, N = outputs, K = inputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from scipy.linalg import helmert
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from smelt.calibration.samples import load_calibration_samples, warn_of_few_held_back
from smelt.calibration.statistics import batches_on_device
from smelt.compress.quantize.plan_layers import (
    PlannedLayer,
    dequantize_codes,
    plan_layers,
    round_to_nearest,
)
from smelt.compress.rotate.rotations import Rotation
from smelt.compress.rotate.settings import LearnedRotations, RotateSettings
from smelt.core.artifact import Artifact
from smelt.core.near_ties import round_significant
from smelt.models.sentence_model import head_output
from smelt.models.text_rules import is_sentence_model
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.schemes.registry import find_scheme
from smelt.runtimes.device import torch_device
from smelt.stage import Context
from smelt.training.losses import classification_loss, model_inputs

# How often the matrices of updates are compared, and the best ones kept.
_COMPARISONS = 10
# Returns the quantized weights of a layer, both float32 [N, K].
WeightRounding: TypeAlias = Callable[[Tensor, PlannedLayer], Tensor]


class LearnedMatrix(nn.Module):
    """The orthogonal matrix of a rotation as a parameter, float64.

    A matrix that has to keep the mean is learned in the space without a mean, [c - 1, c - 1], which the rows
    of Helmert's matrix but the first span.
    """

    basis: Tensor

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        size = len(rotation.matrix)
        basis = torch.from_numpy(helmert(size)) if rotation.keeps_mean else torch.eye(size).double()
        self.register_buffer("basis", basis)
        self.weight = nn.Parameter(basis @ rotation.matrix @ basis.T)
        orthogonal(self, "weight", "cayley")

    def forward(self) -> Tensor:
        """Return the matrix [c, c]."""
        mean = torch.eye(self.basis.shape[1]).to(self.basis) - self.basis.T @ self.basis
        return self.basis.T @ self.weight @ self.basis + mean


def rounded(weight: Tensor, layer: PlannedLayer) -> Tensor:
    """Return `weight`, float32 [N, K], rounded to nearest for `layer`, dequantized."""
    scheme = find_scheme(layer.scheme)
    codes = round_to_nearest(weight, scheme, layer.options)
    return dequantize_codes(codes, scheme, layer.options, weight)


class RoundingNoise:
    """Adds uniform noise from -1/2 to 1/2 of the scale to weights, with gradients for the scales.

    Args:
        generator: of the noise, on the CPU.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, weight: Tensor, layer: PlannedLayer) -> Tensor:
        """Return `weight`, float32 [N, K], with noise by the scales of `layer`."""
        scheme = find_scheme(layer.scheme)
        groups = split_into_groups(weight, scheme.group_size(weight.shape[1], layer.options))
        qparams = scheme.compute_qparams(groups.detach(), weight.shape[1], layer.options)
        low, high = (end.unsqueeze(-1) for end in groups.aminmax(dim=-1))
        span = high.clamp(min=0) - low.clamp(max=0) if "zeros" in qparams else torch.maximum(high, -low)
        scales = qparams["scales"].unsqueeze(-1) * (span / span.detach().where(span != 0, 1.0))
        noise = torch.rand(groups.shape, generator=self._generator).to(groups) - 0.5
        return weight + (scales * noise).flatten(1)[:, : weight.shape[1]]


class QuantizationLoss:
    """How far a rotated and quantized model is from the float model.

    Args:
        model: of floats, without gradients; it stays unchanged.
        rotations: of its parameters.
        layers: the layers that will be quantized.
    """

    def __init__(self, model: Any, rotations: Sequence[Rotation], layers: Sequence[PlannedLayer]) -> None:
        self._model, self._rotations = model, rotations
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._layers = {names[layer.weight_id]: layer for layer in layers}

    def changed_parameters(self, matrices: Sequence[Tensor], quantize: WeightRounding) -> dict[str, Tensor]:
        """Return the parameters that are rotated or quantized, float32, by name.

        Args:
            matrices: of the rotations, float64 [c, c].
            quantize: rounds weights, or adds noise.
        """
        parameters = {name: self._model.get_parameter(name) for name in self._layers}
        for rotation, matrix in zip(self._rotations, matrices, strict=True):
            for axis in rotation.axes:
                weight = parameters.get(axis.parameter, self._model.get_parameter(axis.parameter))
                parameters[axis.parameter] = axis.rotate(weight, matrix.to(weight))
        quantized = {n: quantize(parameters[n], layer) for n, layer in self._layers.items()}
        return parameters | quantized

    def __call__(
        self, batch: Mapping[str, Tensor], matrices: Sequence[Tensor], quantize: WeightRounding = rounded
    ) -> Tensor:
        """Return the Kullback-Leibler divergence in nats; of numbers or embeddings the mean squared error.

        Args:
            batch: with labels, which mark padding.
            matrices: of the rotations, float64 [c, c].
            quantize: rounds weights, or adds noise.

        Returns:
            float32 scalar.
        """
        inputs: dict[str, Any] = model_inputs(batch)
        if self._model.can_generate():
            inputs["use_cache"] = False
        with torch.no_grad():
            expected = head_output(self._model(**inputs))
        outputs = head_output(
            functional_call(self._model, self.changed_parameters(matrices, quantize), (), inputs)
        )
        if is_sentence_model(self._model):
            return F.mse_loss(outputs, expected)
        return classification_loss(
            self._model.config, outputs, batch["labels"], expected, logits_weight=1.0, labels_weight=0.0
        )


def learn_rotations(
    model: Any, rotations: Sequence[Rotation], src: Artifact, settings: RotateSettings, ctx: Context
) -> None:
    """Replace the matrices of `rotations` by learned ones, if these are better on samples held back.

    Args:
        model: float32, in eval mode, on the CPU, with the weights of its norms in other layers; unchanged.
        rotations: changed in place; their matrices are the initial ones.
        src: the artifact with the tokenizer.
        settings: with `learned`.
        ctx: data, seed, device; gets details.

    Raises:
        InputError: there are no samples.
    """
    assert settings.learned is not None
    samples = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "rotate", padded=True, held_back=True
    )
    device = torch_device(ctx.device)
    model.requires_grad_(False).to(device)
    loss = QuantizationLoss(model, rotations, plan_layers(model, settings.learned.quantization))
    matrices = nn.ModuleList(LearnedMatrix(rotation) for rotation in rotations).to(device)
    initial = [matrix().detach() for matrix in matrices]
    learned = _minimize(loss, matrices, batches_on_device(samples, device), settings.learned, ctx)
    judged = batches_on_device(samples.held_back or samples, device)
    num_judged = samples.held_back.num_samples if samples.held_back else 0
    warn_of_few_held_back(num_judged, "The learned rotations are compared with the initial ones", ctx)
    before, after = (_mean_loss(loss, judged, values) for values in (initial, learned))
    if after < before:
        for rotation, matrix in zip(rotations, learned, strict=True):
            rotation.matrix = matrix.cpu()
    else:
        ctx.warn(
            "rotations-not-better",
            f"The learned rotations are not used: their divergence is {after:.3g}, that of"
            f" the initial ones {before:.3g}. Increase calibration_samples, or remove learned.",
            setting="learned",
        )
    model.to("cpu")
    ctx.details["calibration"] = samples.details
    ctx.details["divergence_before"] = round_significant(before)
    ctx.details["divergence_after"] = round_significant(after)


def _minimize(
    loss: QuantizationLoss,
    matrices: nn.ModuleList,
    batches: Sequence[Mapping[str, Tensor]],
    settings: LearnedRotations,
    ctx: Context,
) -> list[Tensor]:
    """Return the matrices with the least loss on `batches` among those of some updates of `matrices`."""
    optimizer = torch.optim.Adam(matrices.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.iterations)
    generator, order = torch.Generator().manual_seed(ctx.seed), list[int]()
    noise, interval = RoundingNoise(generator), max(1, settings.iterations // _COMPARISONS)
    least, best = math.inf, list[Tensor]()
    for iteration in range(1, settings.iterations + 1):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        optimizer.zero_grad()
        loss(batches[order.pop()], [matrix() for matrix in matrices], noise).backward()
        optimizer.step()
        schedule.step()
        if iteration % interval == 0 or iteration == settings.iterations:
            current = [matrix().detach() for matrix in matrices]
            value = _mean_loss(loss, batches, current)
            if not best or value < least:
                least, best = value, current
        ctx.progress(iteration, settings.iterations, f"divergence {least:.3g}")
    return best


@torch.no_grad()
def _mean_loss(
    loss: QuantizationLoss, batches: Sequence[Mapping[str, Tensor]], matrices: Sequence[Tensor]
) -> float:
    """Return the mean loss over `batches`."""
    return sum(float(loss(batch, matrices)) for batch in batches) / len(batches)
