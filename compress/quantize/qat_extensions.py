"""Extensions of quantization-aware training: learned step sizes (scales), and ternary weight splitting.

Splitting replaces each ternary matrix by the sum of two binary ones for further training (Bai et al. 2021,
BinaryBERT, arXiv:2012.15701, section 3.2, equations 5 to 8). A ternary model of half the width is easier to
train than a binary one; after splitting, it computes the same with twice as many one-bit matrices, which are
then trained. With I the nonzero positions of a group, n its number of weights, n0 the number outside of I, s
its scale, and w the master weights,

    in I           v1 = m w                   v2 = (1 - m) w
    w > 0 outside  v1 = w + b                 v2 = -b
    else           v1 = b                     v2 = w - b

    b = (n s - sum |w|) / (2 n0)              m = (A11 + A22 - A12) / (2 A11)

with A11 the sum of |w| in I, A12 and A22 those of |v1| and |v2| outside. So v1 + v2 = w, both have the mean
magnitude s / 2, and their signs agree in I alone: the two binary matrices add up to the ternary one.

If master weights and quantized weights do not match exactly (GPTQ, learned scales), b or m may leave their
ranges and are clamped: the signs are still correct, the mean magnitudes approximate.

Shapes: N = outputs, G = groups of a row, g = inputs of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.quantize.qat import QatEmbedding, QatLinear, qat_layers
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.quantize.step_sizes import ActivationStepSize, StepSizes
from smelt.core.errors import InputError
from smelt.models.edits import Edit, replace_module
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.layers import QuantizedLinear, QuantizedMatrix, SplitLinear
from smelt.quantization.scheme import Scheme, UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, find_scheme
from smelt.stage import Context
from smelt.training.extension import Objective, ParameterGroup, TrainingExtension


class StepSizeTraining:
    """Learned step sizes (LSQ) of a model during quantization-aware training.

    Args:
        model: prepared by `prepare_qat`; it computes with the learned steps from now on, including steps of
        an
            earlier phase.
        settings: settings with the learning rate.
        stage: the name of the stage, for messages.

    Raises:
        InputError: the model is not quantized, or no scales can be learned.
    """

    def __init__(self, model: nn.Module, settings: QatSettings, stage: str) -> None:
        self.settings = settings
        self.steps: dict[int, StepSizes] = {}
        self.left: dict[str, list[str]] = {}  # by scheme, the layers with computed scales
        ranges: dict[tuple[str, float, float], ActivationStepSize] = {}
        for name, latent in qat_layers(model):
            matrix = latent.quantized.matrix
            if matrix.scheme.code_range(matrix.unpack().qparams, matrix.options) is None:
                self.left.setdefault(matrix.scheme.name, []).append(name)
                continue
            steps = self.steps.setdefault(id(matrix), latent.step_sizes or StepSizes(matrix))
            latent.learn_step_sizes(steps)
            static_range = (
                matrix.scheme.static_activation_range(matrix) if isinstance(latent, QatLinear) else None
            )
            if static_range is not None and steps.range is None:
                # linear layers with the same inputs have the same range
                range_key = name.rpartition(".")[0], float(static_range[0]), static_range[1]
                steps.range = ranges.setdefault(range_key, ActivationStepSize(*static_range))
        if not self.steps:
            raise InputError(
                f"{stage}: qat: scales: lsq trains the scales of quantized weights, and"
                f" {self._no_steps_reason()}",
                code="scales-not-learned" if self.left else "not-quantized",
                setting="qat.scales",
            )
        self.home = nn.ModuleList(self.steps.values())

    def _no_steps_reason(self) -> str:
        if not self.left:
            return "the model is not quantized. Put `quantize` before this step, or remove scales: lsq."
        names = " and ".join(self.left)
        return f"{names} has no trainable scales. Use another scheme, or remove scales: lsq."

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` unchanged; steps need no extra loss."""
        return objective

    def extension(self) -> TrainingExtension:
        """Return the training extension with the steps, without weight decay."""
        group = ParameterGroup(
            list(self.home.parameters()), learning_rate=self.settings.learning_rate, weight_decay=0
        )
        return TrainingExtension(modules={"steps": self.home}, groups=[group])

    def finalize(self, ctx: Context) -> None:
        """Report the changes of the scales to `ctx`; they are stored by `convert_qat`."""
        ratios = torch.cat([steps.scale_changes().flatten() for steps in self.steps.values()])
        ranges = {id(steps.range): steps.range for steps in self.steps.values() if steps.range is not None}
        details: dict[str, Any] = {
            "matrices": len(self.steps),
            "scales": ratios.numel(),
            "mean_ratio": round(float(ratios.mean()), 4),
            "mean_change": round(float(ratios.log().abs().mean()), 4),
        }
        if ranges:
            details["ranges"] = len(ranges)
        ctx.details["learned_scales"] = details
        for scheme, names in self.left.items():
            ctx.warn(
                "scales-not-learned",
                f"qat: scales of {scheme} cannot be learned; the scales of {len(names)} layers"
                f" ({names[0]}{' and others' if len(names) > 1 else ''}) are computed from the weights.",
            )


_MIN_SCALE = 1e-3  # b in scales, m in parts of one


def split_ternary_groups(
    weight: Tensor, codes: Tensor, scales: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Return v1 and v2 of groups, float64 [N, G, g].

    Args:
        weight: w, [N, G, g].
        codes: -1, 0 or 1, [N, G, g].
        scales: s, [N, G].
        valid: which positions of a row are weights, not padding of its last group, bool [G, g].
    """
    w, s = weight.double(), scales.double()[..., None]
    nonzero = (codes != 0) & valid
    w = torch.where(nonzero & (w.sign() != codes), s * codes, w)
    zero = ~nonzero & valid
    sizes = w.abs()

    def total(values: Tensor, where: Tensor) -> Tensor:
        return (values * where).sum(dim=-1, keepdim=True)

    n, n0 = valid.sum(dim=-1).double()[:, None], zero.sum(dim=-1, keepdim=True).double()
    b = (n * s - total(sizes, valid)) / (2 * n0.clamp(min=1))
    b = torch.maximum(b, _MIN_SCALE * s)
    v1, v2 = torch.where(w > 0, w + b, b), torch.where(w > 0, -b, w - b)
    a11 = total(sizes, nonzero)
    ratio = (a11 + total(v2.abs(), zero) - total(v1.abs(), zero)) / (2 * a11)
    m = ratio.where(a11 > 0, 0.5).clamp(_MIN_SCALE, 1 - _MIN_SCALE)
    return torch.where(nonzero, m * w, v1) * valid, torch.where(nonzero, (1 - m) * w, v2) * valid


def split_before_training(
    model: nn.Module, edits: list[Edit], settings: QatSettings | None, ctx: Context
) -> list[Edit]:
    """Split the ternary layers of `model` before training if the settings ask for it; return its edits.

    Raises:
        InputError: layers cannot be split (see `split_ternary_layers`).
    """
    if settings is None or not settings.weight_splitting:
        return edits
    edits, ctx.details["split_layers"] = split_ternary_layers(model, edits)
    return edits


def split_ternary_layers(model: nn.Module, edits: list[Edit]) -> tuple[list[Edit], int]:
    """Split the ternary linear layers of `model` in place, with master weights for both halves.

    Embeddings are not split: only products are computed as a sum of two.

    Args:
        model: prepared by `prepare_qat`.
        edits: the edits of the model.

    Returns:
        The edits of the result, and the number of split layers.

    Raises:
        InputError: no layer is ternary, or one has per-row scales or a low-rank correction.
    """
    latents = qat_layers(model)
    looked_up = {id(m.quantized.matrix) for _, m in latents if isinstance(m, QatEmbedding)}
    replacements: dict[int, SplitLinear] = {}
    for name, latent in latents:
        matrix = latent.quantized.matrix
        if not isinstance(latent, QatLinear) or not matrix.scheme.split_scheme or id(matrix) in looked_up:
            continue
        if id(latent) not in replacements:
            edits = _split_edits(edits, name, matrix)
            replacements[id(latent)] = _split_layer(latent).train(latent.training)
        replace_module(model, name, replacements[id(latent)])
    if not replacements:
        schemes = " or ".join(name for name, scheme in SCHEMES.items() if scheme.split_scheme)
        raise InputError(
            f"qat: weight_splitting applies only to layers of scheme {schemes}, and the model has none."
            f" Put quantize: {{scheme: {schemes}}} and a training step before this step, or remove"
            " weight_splitting.",
            code="no-layer-of-scheme",
            setting="qat.weight_splitting",
        )
    return edits, len(replacements)


def _split_edits(edits: list[Edit], name: str, matrix: QuantizedMatrix) -> list[Edit]:
    """Return `edits` with two binary layers instead of the ternary layer `name`.

    Raises:
        InputError: the layer cannot be split.
    """
    index = next((i for i, e in enumerate(edits) if e["op"] == "quantize" and e["module"] == name), None)
    if index is None:
        raise InputError(
            f"qat: weight_splitting: '{name}' has a low-rank correction, which cannot be split. Remove"
            " low_rank_correction or lora from the earlier steps.",
            code="has-low-rank-correction",
            setting="qat.weight_splitting",
        )
    scheme, options = _half_scheme(matrix)
    if matrix.scheme.group_size(matrix.width, matrix.options) != scheme.group_size(matrix.width, options):
        raise InputError(
            f"qat: weight_splitting: '{name}' has one scale per row, and {scheme.name} needs one per group"
            " of inputs. Quantize with granularity: group.",
            code="wrong-granularity",
            setting="qat.weight_splitting",
        )
    halves = [
        {"op": "quantize", "module": f"{name}.{half}", "scheme": scheme.name, **options}
        for half in ("first", "second")
    ]
    return [*edits[:index], {"op": "split", "module": name}, *halves, *edits[index + 1 :]]


def _half_scheme(matrix: QuantizedMatrix) -> tuple[Scheme, dict[str, Any]]:
    """Return the scheme of the halves, and the options of the matrix that apply to it."""
    scheme = find_scheme(matrix.scheme.split_scheme)
    return scheme, {option.name: matrix.options[option.name] for option in scheme.option_specs}


def _split_layer(latent: QatLinear) -> SplitLinear:
    """Return the layer split in two, with master weights."""
    matrix = latent.quantized.matrix
    size = matrix.scheme.group_size(matrix.width, matrix.options)
    codes, grid = matrix.unpack()
    signs = matrix.scheme.dequantize(codes, grid, matrix.options).sign()
    valid = split_into_groups(torch.ones(1, matrix.width), size)[0] > 0
    parts = split_ternary_groups(
        split_into_groups(latent.weight.detach(), size), signs, grid["scales"], valid
    )
    scheme, options = _half_scheme(matrix)
    halves = []
    for index, half_weight in enumerate(parts):
        quantized = QuantizedLinear(
            latent.in_features,
            latent.bias is not None and index == 0,
            QuantizedMatrix(scheme, latent.out_features, matrix.width, options),
        )
        quantized.matrix.set_weight_(UnpackedWeights(half_weight >= 0, {"scales": grid["scales"] / 2}))
        if quantized.bias is not None:
            quantized.bias.data = latent.bias.detach().clone()
        weight = nn.Parameter(half_weight.flatten(1)[:, : matrix.width].float())
        halves.append(QatLinear(quantized, weight).train(latent.training))
    return SplitLinear(*halves)
