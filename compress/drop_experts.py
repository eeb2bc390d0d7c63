"""The stage `drop-experts` and its settings: remove experts of a mixture of experts.

The saliency of an expert j, of the calibration tokens X_j that its router sends to it, with router weight g_j
and output f_j:

    reap         mean over X_j of g_j(x) ||f_j(x)||_2
    frequency    |X_j|

Source: Lasby et al. 2025, REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression,
arXiv:2510.13999, which compares both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from smelt.compress.model_input import load_float_model
from smelt.core.artifact import Artifact
from smelt.core.messages import Message, error_message, with_article
from smelt.models.families.registry import blocks_of, find_family
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
from smelt.stage import Context, Need, Settings, Stage, StoredDtype

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.calibration.samples import CalibrationSamples
    from smelt.models.edits import Edit
    from smelt.models.families.registry import Block


class DropExpertsSettings(Settings):
    """Settings of `drop-experts`."""

    keep_ratio: float = Field(
        default=0.75, gt=0, le=1, description="kept fraction of the experts of each layer"
    )
    importance: Literal["reap", "frequency"] = Field(
        default="reap",
        description="reap: mean of router weight times norm of the output, over an expert's own tokens;"
        " frequency: number of its tokens",
    )
    calibration_samples: int = Field(default=128, ge=1, description="samples that the router is observed on")
    dtype: StoredDtype = "keep"


class DropExperts(Stage[DropExpertsSettings]):
    """Remove the least important experts of each layer of a mixture of experts.

    Saves size in proportion to the removed experts. The router loses their rows and selects as many
    experts for each token as before, among those that are kept. All layers keep equally many, so that
    the Hugging Face config expresses the result. Quality falls at once; add finetune (or distill).

        - drop-experts: {keep_ratio: 0.75}
        - drop-experts: {keep_ratio: 0.5, importance: frequency}
        - finetune: {epochs: 1}
    """

    name: ClassVar[str] = "drop-experts"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = "REAP: Lasby et al. 2025, arXiv:2510.13999"
    version: ClassVar[int] = 1
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[DropExpertsSettings]] = DropExpertsSettings

    @classmethod
    def needs_with(cls, settings: DropExpertsSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the step needs: calibration data, else training data."""
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def invalidates(cls, settings: DropExpertsSettings) -> Mapping[str, str]:
        """Return what this step loses of earlier steps: the training of the removed experts."""
        return {
            "training": "removed experts lose part of what '{step}' trained, and no later step trains the"
            " model; add a finetune or distill after this step"
        }

    @classmethod
    def check_model(
        cls, settings: DropExpertsSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        family = find_family(config)
        if family is None:
            return [], config
        keys = [stack.feed_forward.num_experts_key for stack in family.stacks(config)]
        if keys == [] or keys[0] is None:
            reason = f"{with_article(family.name)} model has no experts"
            return [error_message("does-not-fit-model", f"{reason}; remove drop-experts.")], config
        key = str(keys[0])
        count, selected = int(config[key]), int(config[family.experts_per_token_key])
        num_kept = kept_experts(count, settings.keep_ratio)
        if num_kept < selected:
            return [
                error_message(
                    "too-few-experts",
                    f"keep_ratio {settings.keep_ratio:g} keeps {num_kept} of {count} experts, but the router"
                    f" selects {selected} for each token. Set keep_ratio to at least {selected / count:.3g}.",
                    setting="keep_ratio",
                )
            ], config
        return [], {**config, key: num_kept}

    @classmethod
    def estimate_size(cls, settings: DropExpertsSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step, a pass over the calibration samples."""
        return one_shot_size(inputs, samples=settings.calibration_samples)

    def __call__(self, src: Artifact, settings: DropExpertsSettings, ctx: Context) -> None:
        """Remove experts of the model in `src`, and write it to `ctx.out`.

        Raises:
            InputError: the model has no experts, or too few would be kept.
        """
        from smelt.calibration.samples import load_calibration_samples
        from smelt.core.errors import InputError
        from smelt.models.checkpoint import count_stored_parameters, save_model
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            model, edits = load_float_model(src, self.name)
            errors, config = self.check_model(settings, model.config.to_dict())
            if errors:
                raise InputError(f"drop-experts: {errors[0].message}", code=errors[0].code, messages=errors)
            samples = load_calibration_samples(model, src, settings.calibration_samples, ctx, self.name)
            ctx.details["parameters_before"] = count_stored_parameters(model)
            saliency = measure_saliency(model, samples, settings.importance, ctx)
            kept_indices = {
                path: _most_salient(scores, settings.keep_ratio) for path, scores in saliency.items()
            }
            edits = remove_experts(model, edits, kept_indices)
            model.config.update(dict(config))
            ctx.details["parameters_after"] = count_stored_parameters(model)
            ctx.details["calibration"] = samples.details
            ctx.details["kept_experts"] = kept_indices
            ctx.details["saliency"] = {
                path: [float(f"{score:.4g}") for score in scores] for path, scores in saliency.items()
            }
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def kept_experts(count: int, keep_ratio: float) -> int:
    """Return how many of `count` experts are kept: rounded, a half up, and at least one."""
    return max(1, math.floor(keep_ratio * count + 0.5))


def measure_saliency(
    model: Any, samples: CalibrationSamples, importance: Literal["reap", "frequency"], ctx: Context
) -> dict[str, list[float]]:
    """Return the saliency of each expert, by the dotted name of its block's list of experts.

    An expert without tokens has 0.
    """
    import torch

    from smelt.calibration.samples import model_outputs

    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}

    def observe(path: str) -> Any:
        def hook(experts: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            states, selected, weights = inputs
            for index, expert in enumerate(experts):
                tokens, position = torch.where(selected == index)
                norms = expert(states[tokens]).norm(dim=-1)
                sums[path][index] += (weights[tokens, position] * norms).sum().double()
                counts[path][index] += len(tokens)

        return hook

    handles = []
    for block in blocks_of(model):
        if block.feed_forwards:
            path = _experts_path(block)
            experts = model.get_submodule(path)
            sums[path], counts[path] = (torch.zeros(len(experts), dtype=torch.float64) for _ in range(2))
            handles.append(experts.register_forward_pre_hook(observe(path)))
    try:
        for done, _ in enumerate(model_outputs(model, samples.batches), start=1):
            ctx.progress(done, len(samples.batches), "calibration")
    finally:
        for handle in handles:
            handle.remove()
    if importance == "frequency":
        return {path: count.tolist() for path, count in counts.items()}
    return {path: (sums[path] / counts[path].clamp(min=1)).tolist() for path in sums}


def _experts_path(block: Block) -> str:
    return str(block.stack.feed_forward.with_prefix(block.module_path).experts)


def _most_salient(scores: list[float], keep_ratio: float) -> list[int]:
    """Return the indices of the kept experts, rising; of nearly equal ones the first are kept."""
    order = sorted(range(len(scores)), key=lambda index: (-float(f"{scores[index]:.6g}"), index))
    return sorted(order[: kept_experts(len(scores), keep_ratio)])


def remove_experts(model: Any, edits: list[Edit], kept_indices: Mapping[str, list[int]]) -> list[Edit]:
    """Keep the experts `kept_indices`, rising indices by the name of a list, in place; return the edits.

    Edits of removed experts are removed, and those of kept experts get their new names.
    """
    from torch import nn

    for block in blocks_of(model):
        if not block.feed_forwards:
            continue
        part = block.stack.feed_forward.with_prefix(block.module_path)
        indices = kept_indices[str(part.experts)]
        experts, router = model.get_submodule(str(part.experts)), model.get_submodule(str(part.router))
        members = list(experts)
        while len(experts):
            del experts[-1]
        experts.extend(members[index] for index in indices)
        router.weight = nn.Parameter(router.weight.detach()[indices].clone())
    return [renamed for edit in edits if (renamed := _rename_edit(edit, kept_indices)) is not None]


def _rename_edit(edit: Edit, kept_indices: Mapping[str, list[int]]) -> Edit | None:
    """Return `edit` with the new names of experts; None if it changes a removed one."""
    renamed = dict(edit)
    for key in ("module", "with"):
        match = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)?", str(edit.get(key, "")))
        if match is None or match[1] not in kept_indices:
            continue
        if int(match[2]) not in kept_indices[match[1]]:
            return None
        renamed[key] = f"{match[1]}.{kept_indices[match[1]].index(int(match[2]))}{match[3] or ''}"
    return renamed
