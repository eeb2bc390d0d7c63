"""The stage `rotate`: change the basis of hidden states and of values, without a change of the outputs.

Rotations spread a few large weights or activations over all channels, so that one scale fits more of them.
With the principal axes as basis, the channels with the least variance can be pruned.

Source: QuaRot, Ashkboos et al. 2024, arXiv:2404.00456; SpinQuant, Liu et al. 2024, arXiv:2405.16406;
SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.model_input import load_float_model
from smelt.compress.rotate.settings import RotateSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message, with_article
from smelt.models.families.limits import fixed_width_reason, no_blocks_reason
from smelt.models.families.registry import FAMILIES, find_family
from smelt.stage import Context, Need, Stage

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from smelt.compress.quantize.scale_targets import NormGroup
    from smelt.compress.rotate.rotations import Rotation
    from smelt.models.model_size import SizeInputs, StepSize


class Rotate(Stage[RotateSettings]):
    """Rotate hidden states and values, so that few-bit scales fit them better; outputs do not change.

    A random Hadamard matrix spreads large channels over all channels. Rotations are multiplied into
    the weights, and the weights of norms into the layers that read them, so the model has the same
    layers and speed. An output layer that was tied to the token embedding becomes a matrix of its
    own. The hidden states (width) can be rotated where nothing but norms of parts reads them
    unrotated: not in post-norm models, and not with norms of embeddings or positions of sines;
    values (heads) in every model with attention. Helps models with outliers; small models have few.

    With learned they are learned for one scheme: the divergence of the quantized model is minimized.

        - rotate: {learned: {scheme: int4}}
        - quantize: {scheme: int4, method: gptq}
    """

    name: ClassVar[str] = "rotate"
    source: ClassVar[str] = (
        "QuaRot: Ashkboos et al. 2024, arXiv:2404.00456 (R1, R2); learned: SpinQuant, Liu et al. 2024,"
        " arXiv:2405.16406; pca: SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024, with one basis for all"
        " layers"
    )
    version: ClassVar[int] = 1
    needs_float: ClassVar[bool] = True
    may_need: ClassVar[frozenset[Need]] = frozenset({"calibration", "train"})
    settings_type: ClassVar[type[RotateSettings]] = RotateSettings

    @classmethod
    def needs_with(cls, settings: RotateSettings, available: Any = ()) -> frozenset[Need]:
        """Return the data that the step needs: calibration data, else training data, if it calibrates."""
        if not settings.needs_calibration:
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
        from smelt.models.model_size import FLOAT_BYTES, one_shot_size

        samples = settings.calibration_samples if settings.needs_calibration else 1
        # learned: rotated and quantized weights, with what their gradients need
        copies = 0 if settings.learned is None else 6
        more_bytes = copies * FLOAT_BYTES * inputs.source.parameters
        result = inputs.result
        unties = "width" in settings.targets and result.is_encoder_decoder and not result.head_weights
        if unties:  # T5's config does not show it
            result = replace(result, head_weights=result.table_weights)
        return one_shot_size(inputs, result=result, more_bytes=more_bytes, samples=samples)

    def __call__(self, src: Artifact, settings: RotateSettings, ctx: Context) -> None:
        """Rotate the model of `src` and write it to `ctx.out`."""
        import numpy as np

        from smelt.compress.rotate.learned import learn_rotations
        from smelt.compress.rotate.rotations import Rotation, apply_rotations, head_rotations
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
            rotations = list[Rotation]()
            if "width" in settings.targets:
                rotations += self._state_rotation(model, src, settings, ctx, rng)
                ctx.details["rotated_channels"] = sum(len(rotation.matrix) for rotation in rotations)
            if "heads" in settings.targets:
                of_heads = head_rotations(model, rng)
                ctx.details["rotated_attentions"] = len(of_heads)
                rotations += of_heads
            if settings.learned is not None and rotations:
                learn_rotations(model, rotations, src, settings, ctx)
            apply_rotations(model, rotations)
            ctx.details["parameters_after"] = count_stored_parameters(model)
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))

    def _state_rotation(
        self, model: Any, src: Artifact, settings: RotateSettings, ctx: Context, rng: np.random.Generator
    ) -> list[Rotation]:
        """Fold the norms of `model` in place; return the rotation of its hidden states, if there is one."""
        from torch import nn

        from smelt.compress.rotate import rotations
        from smelt.models.hidden_width import hidden_width

        groups = rotations.norm_groups(model)
        if (reason := rotations.shared_layers_reason(model, groups)) is not None:
            ctx.warn(
                "shared-layers",
                f"The hidden states are not rotated: {reason}. Put rotate before share-weights.",
                setting="targets",
            )
            return []
        has_means = any(isinstance(model.get_submodule(group.norm), nn.LayerNorm) for group in groups)
        if has_means and settings.method == "pca":
            raise InputError(
                "rotate: method: pca needs a model with RMSNorm: the rotations that LayerNorm allows keep the"
                " mean over channels. Set method: hadamard.",
                code="fixed-basis",
                setting="method",
            )
        rotations.fold_norms(model, groups)
        width = hidden_width(model)
        if settings.method == "pca":
            matrix = _principal_axes(model, groups, src, settings, ctx)
        elif has_means:
            matrix = rotations.random_rotation_with_mean(width, rng)
        else:
            matrix = rotations.random_hadamard(width, rng)
        return [rotations.hidden_rotation(model, matrix, has_means)]


def _fixed_basis_reason(config: Mapping[str, Any]) -> str | None:
    """Return why the hidden states of a model of this config cannot be rotated; None if they can."""
    family = find_family(config)
    if family is None:
        return None
    kind = f"{with_article(family.name)} model"
    streams = [stack.stream for stack in family.stacks(config)]
    reasons = {
        "has norms after the sums (post-norm), whose weights are those of single channels": not all(
            stream.pre_norm for stream in streams
        ),
        "has norms of its parts' outputs, whose weights are those of single channels": any(
            stream.output_norms for stream in streams
        ),
        "has a norm after the embeddings, whose weights are those of single channels": any(
            stream.embedding_norm for stream in streams
        ),
        "scales each channel of the outputs of its parts (LayerScale)": any(
            stream.part_scales for stream in streams
        ),
        "computes its positions (sines) for single channels": family.position_encoding.is_sinusoidal,
    }
    for reason, applies in reasons.items():
        if applies:
            return f"{kind} {reason}"
    return fixed_width_reason(config)


def _unties(config: Mapping[str, Any]) -> bool:
    """Return whether a tied output layer gets a matrix of its own, which the config of the result states.

    It takes the weight of the final norm. T5's config keeps a factor of the output layer with the tie.
    """
    family = find_family(config)
    if family is None or family.architecture == "encoder":
        return False
    has_final_norm = bool(family.stacks(config)[-1].stream.final_norm)
    return has_final_norm and family.ties_output(config) and family.output_scale(config) == 1


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
