"""The stage `rotate`: change the basis of hidden states and of values, without a change of the outputs.

A linear layer of rotated inputs x Q computes the same with the weight W Q, and one with the weight Q^T W has
rotated outputs. So a rotation of the hidden states (R1 of QuaRot and SpinQuant) is folded into the embeddings
and into all layers that read or write the states; nothing is computed for it at run time. The weights of the
norms between them are first moved into the layers that read the norms: without weights RMSNorm(x Q) is
RMSNorm(x) Q, and LayerNorm(x Q) is LayerNorm(x) Q if Q maps the vector of ones to itself, so that means are
kept. A rotation of the values of a head (R2) is folded into the value and output layers of attention.

Rotations spread a few large weights or activations over all channels, so that one scale fits more of them.
With the principal axes as basis, the channels with the least variance can be pruned.

Source: QuaRot, Ashkboos et al. 2024, arXiv:2404.00456, section 4; SpinQuant, Liu et al. 2024,
arXiv:2405.16406, section 3.1; SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024, section 3.

Shapes: D = channels of the hidden states, d = channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.model_input import load_float_model
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, SettingError
from smelt.core.messages import Message, error_message, with_article
from smelt.models.families.registry import (
    FAMILIES,
    find_family,
    hidden_norm_names,
    model_attentions,
    no_blocks_reason,
    norm_consumers,
    shared_inputs,
)
from smelt.stage import Context, Need, Settings, Stage, StoredDtype

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from smelt.compress.quantize.scale_targets import NormGroup
    from smelt.models.model_size import SizeInputs, StepSize


class RotateSettings(Settings):
    """Settings of `rotate`."""

    targets: list[Literal["width", "heads"]] = Field(
        default=["width", "heads"],
        min_length=1,
        description="width: the hidden states; heads: the values of each head of attention",
    )
    method: Literal["hadamard", "pca"] = Field(
        default="hadamard",
        description="basis of the hidden states: a random Hadamard matrix, or their principal axes on"
        " calibration samples; values always get a Hadamard matrix",
    )
    calibration_samples: int | None = Field(
        default=None, ge=1, description="for pca; default: ten tokens per input of the widest layer"
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _principal_axes_of_states(self) -> Self:
        if self.calibration_samples and self.method != "pca":
            raise SettingError(
                "calibration_samples has no effect without method: pca; remove it", code="unused-setting"
            )
        if self.method == "pca" and "width" not in self.targets:
            raise SettingError(
                "method: pca applies only to the hidden states; add width to targets", code="unused-setting"
            )
        return self


class Rotate(Stage[RotateSettings]):
    """Rotate hidden states and values, so that few-bit scales fit them better; outputs do not change.

    A random Hadamard matrix spreads large channels over all channels. Rotations are multiplied into
    the weights, and the weights of norms into the layers that read them, so the model has the same
    layers and speed. An output layer that was tied to the token embedding becomes a matrix of its
    own. The hidden states (width) can be rotated where nothing but norms of parts reads them
    unrotated: not in post-norm models, and not with norms of embeddings or positions of sines;
    values (heads) in every model with attention. Helps models with outliers; small models have few.

        - rotate: {}
        - quantize: {scheme: int4, method: gptq}
    """

    name: ClassVar[str] = "rotate"
    source: ClassVar[str] = (
        "QuaRot: Ashkboos et al. 2024, arXiv:2404.00456 (R1, R2); SpinQuant: Liu et al. 2024,"
        " arXiv:2405.16406; pca: SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024, with one basis for all"
        " layers"
    )
    version: ClassVar[int] = 1
    needs_float: ClassVar[bool] = True
    may_need: ClassVar[frozenset[Need]] = frozenset({"calibration", "train"})
    settings_type: ClassVar[type[RotateSettings]] = RotateSettings

    @classmethod
    def needs_with(cls, settings: RotateSettings, available: Any = ()) -> frozenset[Need]:
        """Return the data that the step needs: calibration data, else training data, for principal axes."""
        if settings.method != "pca":
            return frozenset()
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def invalidates(cls, settings: RotateSettings) -> Mapping[str, str]:
        """Return what this step loses of earlier steps: zeros."""
        return {
            "zeros": "rotated matrices are dense: the zeros of '{step}' are lost; put rotate before '{step}'"
        }

    @classmethod
    def check_model(
        cls, settings: RotateSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        if (reason := no_blocks_reason(config)) is not None:
            return [error_message("does-not-fit-model", f"{reason}; remove rotate.")], config
        if "width" not in settings.targets:
            return [], config
        if (reason := _fixed_basis_reason(config)) is not None:
            more = " and remove method: pca" if settings.method == "pca" else ""
            text = f"the hidden states cannot be rotated: {reason}. Set targets: [heads]{more}."
            return [error_message("fixed-basis", text, setting="targets")], config
        return [], {**config, "tie_word_embeddings": False} if _unties(config) else config

    @classmethod
    def estimate_size(cls, settings: RotateSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        from smelt.models.model_size import one_shot_size

        return one_shot_size(inputs, samples=settings.calibration_samples if settings.method == "pca" else 1)

    def __call__(self, src: Artifact, settings: RotateSettings, ctx: Context) -> None:
        """Rotate the model of `src` and write it to `ctx.out`."""
        import numpy as np

        from smelt.models.checkpoint import count_stored_parameters, save_model
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            model, edits = load_float_model(src, self.name)
            if find_family(model.config.to_dict()) is None:
                raise InputError(
                    f"rotate: {with_article(model.config.model_type)} model is not supported."
                    f" Supported: {', '.join(FAMILIES)}.",
                    code="unsupported-family",
                )
            for error in self.check_model(settings, model.config.to_dict())[0]:
                raise InputError(f"rotate: {error.message}", code=error.code, setting=error.setting)
            rng = np.random.default_rng(ctx.seed)
            ctx.details["parameters_before"] = count_stored_parameters(model)
            if "width" in settings.targets:
                ctx.details["rotated_channels"] = self._rotate_states(model, src, settings, ctx, rng)
            if "heads" in settings.targets:
                ctx.details["rotated_attentions"] = rotate_heads(model, rng)
            ctx.details["parameters_after"] = count_stored_parameters(model)
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))

    def _rotate_states(
        self, model: Any, src: Artifact, settings: RotateSettings, ctx: Context, rng: np.random.Generator
    ) -> int:
        """Rotate the hidden states of `model` in place; return how many channels were rotated."""
        from torch import nn

        from smelt.models.hidden_width import hidden_width

        groups = _norm_groups(model)
        if (reason := _shared_layers_reason(model, groups)) is not None:
            ctx.warn(
                "shared-layers",
                f"The hidden states are not rotated: {reason}. Put rotate before share-weights.",
                setting="targets",
            )
            return 0
        has_means = any(isinstance(model.get_submodule(group.norm), nn.LayerNorm) for group in groups)
        if has_means and settings.method == "pca":
            raise InputError(
                "rotate: method: pca needs a model with RMSNorm: the rotations that LayerNorm allows keep the"
                " mean over channels. Set method: hadamard.",
                code="fixed-basis",
                setting="method",
            )
        fold_norms(model, groups)
        width = hidden_width(model)
        if settings.method == "pca":
            rotation = _principal_axes(model, groups, src, settings, ctx)
        else:
            rotation = random_rotation_with_mean(width, rng) if has_means else random_hadamard(width, rng)
        rotate_hidden_states(model, rotation)
        return width


def _fixed_basis_reason(config: Mapping[str, Any]) -> str | None:
    """Return why the hidden states of a model of this config cannot be rotated; None if they can."""
    family = find_family(config)
    if family is None:
        return None
    kind = f"{with_article(family.name)} model"
    streams = [stack.stream for stack in family.stacks(config)]
    if not all(stream.pre_norm for stream in streams):
        return f"{kind} has norms after the sums (post-norm), whose weights are those of single channels"
    if any(stream.embedding_norm for stream in streams):
        return f"{kind} has a norm after the embeddings, whose weights are those of single channels"
    if family.position_encoding.is_sinusoidal:
        return f"{kind} computes its positions (sines) for single channels"
    return None


def _unties(config: Mapping[str, Any]) -> bool:
    """Return whether a tied output layer gets a matrix of its own: it takes the weight of the final norm."""
    family = find_family(config)
    if family is None or family.architecture == "encoder":
        return False
    return bool(family.stacks(config)[-1].stream.final_norm)


def _norm_groups(model: Any) -> list[NormGroup]:
    """Return the norms of the hidden states with the layers that read them."""
    from smelt.compress.quantize.scale_targets import norm_group

    hidden_norms = set(hidden_norm_names(model))
    return [norm_group(model, norm) for norm in norm_consumers(model) if norm.norm in hidden_norms]


def _shared_layers_reason(model: Any, groups: list[NormGroup]) -> str | None:
    """Return why no weights can be moved from norms into their readers; None if they can."""
    from smelt.models.layers import SharedLinear

    owner: dict[Tensor, str] = {}
    for group in groups:
        for layer in group.linear_layers:
            if owner.setdefault(layer.weight, group.norm) != group.norm:
                return f"the norms {owner[layer.weight]} and {group.norm} share a layer that reads them"
    has_differences = any(isinstance(module, SharedLinear) for module in model.modules())
    return "layers share a matrix and add differences (low_rank_delta)" if has_differences else None


def fold_norms(model: Any, groups: list[NormGroup]) -> None:
    """Move the weights and biases of norms into the linear layers that read them, in place.

    A bias stays in the norm, divided by the norm's weight, if a layer that reads the norm has no bias. An
    output layer that is also the token embedding is separated from it.

    Raises:
        InputError: such a bias belongs to a weight of 0.
    """
    import torch

    from smelt.compress.prune.reconstruct import bias_owner
    from smelt.compress.quantize.scale_targets import norm_weight_offset

    offset = norm_weight_offset(model)
    _untie_readers(model, groups)
    with torch.no_grad():
        for group in groups:
            norm: Any = model.get_submodule(group.norm)
            scale, bias = norm.weight + offset, getattr(norm, "bias", None)
            owners = [bias_owner(consumer) for consumer in group.consumers]
            if bias is not None and group.consumers and all(owner.bias is not None for owner in owners):
                for consumer, owner in zip(group.consumers, owners, strict=True):
                    owner.bias.copy_(consumer(bias))
                bias.zero_()
            elif bias is not None:
                if bool(((scale == 0) & (bias != 0)).any()):
                    raise InputError(
                        f"rotate: {group.norm} has channels with weight 0 and a bias, which"
                        " cannot be moved into the layers that read it. Set targets: [heads].",
                        code="zero-norm-weight",
                        setting="targets",
                    )
                bias.copy_((bias / scale).where(scale != 0, bias))
            for layer in group.linear_layers:
                layer.weight.mul_(scale)
            norm.weight.fill_(1 - offset)


def _untie_readers(model: Any, groups: list[NormGroup]) -> None:
    """Give linear layers that share their weight with an embedding a copy of it."""
    from torch import nn

    from smelt.models.families.registry import family_of
    from smelt.quantization.layers import is_embedding_table

    tables = {module.weight for module in model.modules() if is_embedding_table(module)}
    tied_layers = [layer for group in groups for layer in group.linear_layers if layer.weight in tables]
    if not tied_layers:
        return
    for layer in tied_layers:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model.all_tied_weights_keys = {
        target: source
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if parameters[target] is parameters[source]
    }
    family: Any = family_of(model)
    # a factor of the output layer depends on this key; different weights in a file are not tied in any case
    if family.output_scale(model.config.to_dict()) == 1:
        model.config.tie_word_embeddings = False


def rotate_hidden_states(model: Any, rotation: Tensor) -> None:
    """Rotate the hidden states of `model`, whose norms have no weights, in place.

    Args:
        model: of floats.
        rotation: orthogonal, float64 [D, D]; the rotated states are x `rotation`.
    """
    from smelt.models.hidden_width import hidden_axes

    norm_weights = {f"{norm}.weight" for norm in hidden_norm_names(model)}
    axes = {(axis.name, axis.dim) for axis in hidden_axes(model) if axis.stream == "hidden"}
    for name, dim in sorted(axes):
        if name not in norm_weights:
            _rotate_axis(model.get_parameter(name), dim, rotation)


def rotate_heads(model: Any, rng: np.random.Generator) -> int:
    """Rotate the values of all heads of `model` in place, by one random Hadamard matrix for each width.

    Heads of different layers have the same matrix, so that layers can share their weights; queries that share
    a value head read it rotated alike.

    Returns:
        The number of attentions that were rotated; those with layers of another type are skipped.
    """
    from torch import nn

    from smelt.models.layers import LowRankLinear

    producers = {feed.consumers[0]: feed for feed in shared_inputs(model)}
    rotations: dict[int, Tensor] = {}
    axes: dict[tuple[Tensor, int], tuple[Tensor, int]] = {}
    count = 0
    for attention in model_attentions(model):
        feed = producers[attention.out]
        if feed.producer is None:
            continue
        value, out = model.get_submodule(feed.producer), model.get_submodule(attention.out)
        if not (isinstance(value, nn.Linear | LowRankLinear) and isinstance(out, nn.Linear | LowRankLinear)):
            continue
        width = int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
        if width not in rotations:
            rotations[width] = random_hadamard(width, rng)
        rows: Any = value.up if isinstance(value, LowRankLinear) else value
        columns: Any = out.down if isinstance(out, LowRankLinear) else out
        axes[rows.weight, 0] = axes[rows.bias, 0] = rotations[width], feed.start
        axes[columns.weight, 1] = rotations[width], 0
        count += 1
    for (tensor, dim), (rotation, start) in axes.items():
        if tensor is not None:
            _rotate_axis(tensor, dim, rotation, start)
    return count


def _rotate_axis(tensor: Tensor, dim: int, rotation: Tensor, start: int = 0) -> None:
    """Multiply each group of channels of an axis, from the channel `start` on, by `rotation`, in place.

    Args:
        tensor: any shape; its axis has a multiple of the channels of `rotation` after `start`.
        dim: the axis.
        rotation: float64 [channels, channels].
        start: the first channel.
    """
    import torch

    with torch.no_grad():
        channels = tensor.movedim(dim, -1)[..., start:]  # a view
        groups = channels.double().unflatten(-1, (-1, len(rotation))) @ rotation
        channels.copy_(groups.flatten(-2))


def random_hadamard(size: int, rng: np.random.Generator) -> Tensor:
    """Return a random Hadamard matrix, orthogonal, float64 [size, size].

    It is diag(s) (H x R): random signs s, the Kronecker product of the Hadamard matrix H of the largest power
    of two that divides `size`, and a random orthogonal matrix R of the odd rest, which is 1 for a power of
    two: then all entries are +-1 / sqrt(size). (QuaRot has tables of Hadamard matrices of 12, 20, 28, ...
    instead of R.)
    """
    import numpy as np
    import torch
    from scipy.linalg import hadamard
    from scipy.stats import ortho_group

    power = size & -size
    matrix = np.kron(hadamard(power) / math.sqrt(power), ortho_group.rvs(size // power, random_state=rng))
    return torch.from_numpy(rng.choice((-1.0, 1.0), size)[:, None] * matrix)


def random_rotation_with_mean(size: int, rng: np.random.Generator) -> Tensor:
    """Return a random orthogonal matrix that maps the vector of ones to itself, float64 [size, size].

    It is uniformly distributed among them: a random orthogonal matrix in the space without a mean, which the
    rows of Helmert's matrix but the first span.
    """
    import numpy as np
    import torch
    from scipy.linalg import helmert
    from scipy.stats import ortho_group

    basis = helmert(size)
    rotation = basis.T @ ortho_group.rvs(size - 1, random_state=rng) @ basis
    return torch.from_numpy(np.asarray(rotation) + 1 / size)


def _principal_axes(
    model: Any, groups: list[NormGroup], src: Artifact, settings: RotateSettings, ctx: Context
) -> Tensor:
    """Return the principal axes of the norms' outputs, that of the largest variance first, float64 [D, D].

    The second moments of all norms are added: all blocks get one basis, because the sums between them would
    otherwise have to be rotated from one basis to the next.
    """
    import torch

    from smelt.calibration.samples import load_calibration_samples
    from smelt.calibration.statistics import collect_statistics, warn_of_few_tokens

    samples = load_calibration_samples(model, src, settings.calibration_samples, ctx, "rotate", padded=True)
    readers: dict[str, list[nn.Module]] = {
        group.norm: group.consumers[:1] for group in groups if group.consumers
    }
    with collect_statistics(model, samples, readers, ctx) as statistics:
        moments = [s.second_moment / s.tokens for s in statistics.values() if s.second_moment is not None]
        counts = [(s.tokens, s.width) for s in statistics.values()]
    warn_of_few_tokens(counts, samples, ctx)
    axes: Tensor = torch.linalg.eigh(torch.stack(moments).sum(dim=0)).eigenvectors
    return axes.flip(-1)
