"""The stage `sparsify`: set single weights, or n of each m, to zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from smelt.compress.model_input import AFTER_QUANTIZE, sparsity_error, split_pruning_error
from smelt.compress.sparsify.methods.registry import SPARSITY_METHODS
from smelt.compress.sparsify.pattern import SparsityPattern, parse_pattern
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, SettingError
from smelt.core.messages import Message, error_message
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import FAMILIES, find_family, is_user_module
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
from smelt.stage import Context, Need, QuantizedInput, Settings, Stage, StoredDtype

if TYPE_CHECKING:
    from smelt.calibration.samples import CalibrationSamples
    from smelt.models.streamed_model import StreamedModel

_DEFAULT_SPARSITY = 0.5
_CALIBRATED = [name for name, method in SPARSITY_METHODS.items() if method.needs != "nothing"]


class SparsifySettings(Settings):
    """Settings of `sparsify`. Give at most one of sparsity and pattern; default sparsity: 0.5."""

    method: Literal[tuple(SPARSITY_METHODS)] = Field(  # type: ignore[valid-type]
        default="sparsegpt",
        description="; ".join(f"{name}: {known.description}" for name, known in SPARSITY_METHODS.items()),
    )
    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of zeros in each layer; default 0.5 without pattern",
    )
    pattern: str | None = Field(
        default=None, description='"2:4" keeps 2 of each 4 neighboring inputs of an output'
    )
    targets: list[Literal["attention", "ffn"]] = Field(
        default=["attention", "ffn"],
        min_length=1,
        description="linear layers of attention, of the feed-forward part",
    )
    calibration_samples: int | None = Field(
        default=None,
        ge=1,
        description=f"for {', '.join(_CALIBRATED)}; from calibration data, else train; default:"
        " ten tokens per input of the widest layer",
    )
    dtype: StoredDtype = "keep"

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        if value is not None:
            parse_pattern(value)
        return value

    @model_validator(mode="after")
    def _check_sparsity(self) -> SparsifySettings:
        if self.sparsity is not None and self.pattern is not None:
            raise SettingError("set either sparsity or pattern, not both", code="settings-conflict")
        return self

    @property
    def sparsity_pattern(self) -> SparsityPattern:
        """The pattern of the zeros."""
        if self.pattern is None:
            return SparsityPattern(self.sparsity or _DEFAULT_SPARSITY)
        num_kept, group = parse_pattern(self.pattern)
        return SparsityPattern(1 - num_kept / group, num_kept, group)

    @property
    def needs_calibration(self) -> bool:
        """Whether the method uses the inputs of layers."""
        return self.method in _CALIBRATED


class Sparsify(Stage[SparsifySettings]):
    """Set the least important weights of linear layers to zero.

    No runtime that smelt exports to becomes smaller or faster by it: zeros are stored and multiplied
    like other weights; only a compressed file becomes smaller. It is meant for hardware and kernels
    that skip zeros (2:4), and for comparison. Embeddings, norms, biases and output layers are
    unchanged. Blocks are processed one by one, each calibrated on the outputs of the sparse blocks
    before it. finetune and distill keep the zeros, prune removes units around them; factorize
    loses them; quantize keeps them with a symmetric scheme other than binary. After `quantize`, weights
    become the quantized zero.

        - sparsify: {method: sparsegpt, sparsity: 0.5}
        - sparsify: {method: wanda, pattern: "2:4"}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "sparsify"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = "; ".join(
        f"{method.name}: {method.source}" for method in SPARSITY_METHODS.values() if method.source
    )
    version: ClassVar[int] = 3
    changes_quantized_weights: ClassVar[bool] = True
    settings_type: ClassVar[type[SparsifySettings]] = SparsifySettings

    @classmethod
    def provides(cls, settings: SparsifySettings) -> frozenset[str]:
        """Return what later steps may lose: zeros, and the n:m pattern."""
        return frozenset({"zeros"} if settings.pattern is None else {"zeros", "pattern"})

    @classmethod
    def quantized_input_error(cls, settings: SparsifySettings, quantized: QuantizedInput) -> str | None:
        """Return why weights of a quantized model cannot be set to zero, and what to do; None if they can."""
        return split_pruning_error(quantized, cls.name) or sparsity_error(quantized)

    @classmethod
    def needs_with(cls, settings: SparsifySettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the step needs: calibration or training data for methods that use inputs."""
        if not settings.needs_calibration:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def check_model(
        cls, settings: SparsifySettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        if is_user_module(config):
            return _user_module_errors(settings, config), config
        if (reason := no_blocks_reason(config)) is not None:
            return [error_message("does-not-fit-model", f"{reason}; remove sparsify.")], config
        if find_family(config) is not None:
            return [], config
        supported = ", ".join(FAMILIES)
        return [
            error_message(
                "unsupported-family",
                f"{config.get('model_type')} models are not supported. Supported: {supported}.",
            )
        ], config

    @classmethod
    def estimate_size(cls, settings: SparsifySettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        samples = settings.calibration_samples if settings.needs_calibration else 1
        return one_shot_size(inputs, streamed=not inputs.is_gpu, samples=samples)

    def __call__(self, src: Artifact, settings: SparsifySettings, ctx: Context) -> None:
        """Make the model of `src` sparse and write it to `ctx.out`."""
        from smelt.calibration.samples import load_calibration_samples
        from smelt.compress.quantize.requantize import dequantize_model, save_requantized
        from smelt.models.checkpoint import load_model
        from smelt.models.streamed_model import open_streamed
        from smelt.runtimes.device import torch_threads

        streamed = open_streamed(src.path, ctx.out, settings.dtype) if _can_stream(ctx) else None
        model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
        edits, codes = dequantize_model(model, edits, src, ctx, self.name, keep_grids=True)
        if (
            codes is not None
            and (reason := self.quantized_input_error(settings, codes.quantized_input)) is not None
        ):
            raise InputError(f"sparsify: {reason}", code=AFTER_QUANTIZE)
        errors, _ = self.check_model(settings, model.config.to_dict())
        if errors:
            raise InputError(f"sparsify: {errors[0].message}", code=errors[0].code)
        with torch_threads(ctx.threads):
            samples = None
            if settings.needs_calibration:
                samples = load_calibration_samples(
                    model, src, settings.calibration_samples, ctx, self.name, padded=True
                )
                ctx.details["calibration"] = samples.details
            _sparsify_blocks(model, samples, settings, ctx, streamed)
        save_requantized(model, edits, src, settings.dtype, ctx, codes, streamed)


def _user_module_errors(settings: SparsifySettings, config: Mapping[str, Any]) -> list[Message]:
    """Return errors about settings that a PyTorch module of the user's own does not support."""
    if not config.get("linear_layers"):
        text = "the module has no linear layers but its output layer; remove sparsify."
        return [error_message("does-not-fit-model", text)]
    if "targets" in settings.model_fields_set:
        text = (
            f"{no_blocks_reason(config)}: all linear layers but the output layer are sparsified. Remove it."
        )
        return [error_message("does-not-fit-model", text, setting="targets")]
    return []


def _can_stream(ctx: Context) -> bool:
    """Return whether a large model can be processed block by block: only on the CPU."""
    from smelt.runtimes.device import torch_device

    return torch_device(ctx.device) == "cpu"


def _sparsify_blocks(
    model: Any,
    samples: CalibrationSamples | None,
    settings: SparsifySettings,
    ctx: Context,
    streamed: StreamedModel | None,
) -> None:
    """Sparsify the blocks of `model`, or the layers of a user's module, in place; report to `ctx`."""
    import torch

    from smelt.calibration.run_blocks import run_blocks, visit_blocks
    from smelt.calibration.samples import ModelInputs
    from smelt.compress.sparsify.sparsifier import Sparsifier, linear_layers
    from smelt.models.user_module import inner_linear_layers

    generator = torch.Generator().manual_seed(ctx.seed)
    method = SPARSITY_METHODS[settings.method]
    sparsifier = Sparsifier(model, method, settings.sparsity_pattern, generator)
    if is_user_module(model.config.to_dict()):
        observe = None if samples is None else ModelInputs(model, samples, ctx)
        sparsifier.sparsify(inner_linear_layers(model), observe)
    elif samples is None:
        for block in visit_blocks(model, ctx, streamed):
            sparsifier.sparsify(linear_layers(model, block, settings.targets), None)
    else:
        for step in run_blocks(model, samples, ctx, stage="sparsify", offloaded=streamed):
            sparsifier.sparsify(linear_layers(model, step.block, settings.targets), step.observe)
    sparsifier.report(samples, ctx)
