"""The settings of the stages `onnx` and `tensorrt`, and which models support int8 keys and values.

Those are models whose attention is GroupQueryAttention, with head widths that ONNX Runtime's operator
supports. The setting `engine` of `onnx` has options of ONNX Runtime's TensorRT provider. Without torch, since
a plan imports this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.data.tasks import task_traits, tasks_with
from smelt.models.families.registry import find_family
from smelt.models.text_rules import window_length
from smelt.quantization.scheme import FUSED_OPSET, graph_target
from smelt.stage import Settings

if TYPE_CHECKING:
    from smelt.data.splits import Split
    from smelt.quantization.emit import GraphTarget


FIXED_SIZES = ("batch_size", "sequence_length")  # settings, and details of an export with fixed shapes
WeightStorage = Literal["embedded", "refittable", "stripped"]
HardwareCompatibility = Literal["none", "ampere+", "same-cc"]


class LengthSettings(Settings):
    """Input lengths in tokens that the engine is built for: fastest at `opt`, at most `max`."""

    opt: int = Field(ge=1, description="fastest length")
    max: int = Field(ge=1, description="longest input")

    @model_validator(mode="after")
    def _check_order(self) -> LengthSettings:
        if self.opt > self.max:
            raise SettingError(
                f"opt ({self.opt}) must not be greater than max ({self.max}). Change one of them",
                code="opt-above-max",
            )
        return self


class ProfileSettings(Settings):
    """One of several optimization profiles; omitted settings are those of the step."""

    max_batch_size: int | None = Field(default=None, ge=1, le=4096, description="default: the step's")
    opt_batch_size: int | None = Field(default=None, ge=1, le=4096, description="default: the step's")
    lengths: LengthSettings | None = Field(default=None, description="default: the step's")
    length_percentile: float | None = Field(default=None, ge=1, le=100, description="default: the step's")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.lengths is not None and self.length_percentile is not None:
            raise SettingError(
                "a profile cannot have both lengths and length_percentile. Remove one",
                code="settings-conflict",
            )
        return self


class TensorrtSettings(Settings):
    """Settings of `tensorrt`."""

    workspace_mib: int | None = Field(
        default=None, ge=16, le=1 << 20, description="most GPU memory for kernels, MiB; default: no limit"
    )
    optimization_level: int = Field(default=3, ge=0, le=5, description="0 (fast build) to 5 (longest search)")
    tf32: bool = Field(default=True, description="compute float32 matrix multiplications in TF32")
    timing_cache: bool = Field(default=True, description="keep kernel timings for faster builds")
    hardware_compatibility: HardwareCompatibility = Field(
        default="none", description="other GPUs that the engine runs on"
    )
    version_compatible: bool = Field(default=False, description="also runs with later TensorRT versions")
    weights: WeightStorage = Field(
        default="embedded",
        description="refittable: can be replaced; stripped: read from the ONNX file at loading",
    )
    max_batch_size: int = Field(default=8, ge=1, le=4096, description="larger batches are split")
    opt_batch_size: int = Field(default=1, ge=1, le=4096, description="fastest batch")
    lengths: LengthSettings | None = Field(default=None, description="in tokens; default from the data")
    length_percentile: float = Field(
        default=99.0, ge=50, le=100, description="percentile of the data's lengths for lengths.max"
    )
    profiles: list[ProfileSettings] = Field(
        default_factory=list,
        max_length=8,
        description="optimization profiles; each call uses the smallest that fits, one must cover the others",
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="longest output; default score.generation's, else the model's",
    )
    num_beams: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="beams of a text, each a row of the decoder; default score.generation's, else 1",
    )
    weight_streaming: bool = Field(
        default=False, description="keep weights that do not fit into GPU memory in host memory"
    )

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        for profile in self.each_profile():
            if profile.opt_batch_size > profile.max_batch_size:
                raise SettingError(
                    f"opt_batch_size ({profile.opt_batch_size}) must not be greater than max_batch_size"
                    f" ({profile.max_batch_size}). Change one of them",
                    code="opt-above-max",
                )
        return self

    def each_profile(self) -> list[TensorrtSettings]:
        """Return these settings once per profile, with that profile's own values."""
        if not self.profiles:
            return [self]
        return [self._with_profile(profile) for profile in self.profiles]

    def _with_profile(self, profile: ProfileSettings) -> TensorrtSettings:
        explicit = {
            n: getattr(profile, n) for n in profile.model_fields_set if getattr(profile, n) is not None
        }
        if "length_percentile" in explicit:
            explicit["lengths"] = None
        if "max_batch_size" in explicit:  # a smaller profile than the step's own
            explicit.setdefault("opt_batch_size", min(self.opt_batch_size, explicit["max_batch_size"]))
        return self.model_copy(update={**explicit, "profiles": []})


class ProviderSettings(Settings):
    """Options of engines that ONNX Runtime builds when a graph is first opened."""

    workspace_mib: int | None = Field(
        default=None, ge=16, le=1 << 20, description="most GPU memory for kernels, MiB; default: no limit"
    )
    optimization_level: int = Field(default=3, ge=0, le=5, description="0 (fast build) to 5 (longest search)")
    timing_cache: bool = Field(default=True, description="keep kernel timings for faster builds")
    hardware_compatibility: Literal["none", "ampere+"] = Field(
        default="none", description="ampere+: all GPUs since Ampere"
    )
    context_memory: Literal["dedicated", "shared"] = Field(
        default="dedicated", description="shared: one activation memory for all parts of a graph"
    )
    max_batch_size: int = Field(default=8, ge=1, le=4096, description="as in `tensorrt`")
    opt_batch_size: int = Field(default=1, ge=1, le=4096, description="as in `tensorrt`")
    lengths: LengthSettings | None = Field(default=None, description="as in `tensorrt`")
    length_percentile: float = Field(default=99.0, ge=50, le=100, description="as in `tensorrt`")
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096, description="as in `tensorrt`")
    num_beams: int | None = Field(default=None, ge=1, le=64, description="as in `tensorrt`")

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        self.as_tensorrt_settings()
        return self

    def as_tensorrt_settings(self) -> TensorrtSettings:
        """Return the settings of the stage `tensorrt` with the same sizes."""
        return TensorrtSettings(
            max_batch_size=self.max_batch_size,
            opt_batch_size=self.opt_batch_size,
            lengths=self.lengths,
            length_percentile=self.length_percentile,
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
        )


def supports_gqa(head_dim: int, rotary_dim: int) -> bool:
    """Return whether the operator supports this head width: multiples of 8, of 16 the rotated part."""
    return head_dim % 8 == 0 and rotary_dim % 16 == 0


class AutotuneSettings(Settings):
    """The batch sizes and number of beams that operators are chosen for."""

    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] | None = Field(
        default=None, min_length=1, description="texts per call; default: those that `score` times, else 1"
    )
    num_beams: int | None = Field(
        default=None, ge=1, le=64, description="beams of the search; default: those of `score`, else 1"
    )


class OnnxSettings(Settings):
    """Settings of `onnx`."""

    target: Literal["ort-cpu", "ort-cuda", "tensorrt", "openvino", "ort-tensorrt"] = Field(
        default="ort-cpu",
        description="runtime",
    )
    dtype: Literal["fp32", "fp16", "bf16"] = Field(
        default="fp32",
        description="fp16, bf16: for GPUs; openvino computes in bf16",
    )
    simplify: bool = Field(default=True, description="run onnxsim; keep its result if it computes the same")
    opset: int = Field(default=20, ge=13, le=24, description="opset of ONNX's standard operators")
    batch_size: int | None = Field(
        default=None, ge=1, le=4096, description="fixed samples per call; default: dynamic"
    )
    sequence_length: int | None = Field(
        default=None, ge=2, le=1 << 20, description="fixed tokens of a text; default: dynamic"
    )
    generation_graph: bool = Field(
        default=True,
        description="ort-cpu: also export the whole generation loop as one graph",
    )
    autotune: AutotuneSettings | bool = Field(
        default=False,
        description="ort-cpu: measure which operator each quantized layer uses",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["autotune"] | None = Field(
        default=None,
        description="ort-cpu, openvino: the artifact's default; autotune: measure 1 to all cores",
    )
    engine: ProviderSettings | None = Field(
        default=None,
        description="ort-tensorrt: engine options",
    )
    kv_cache: Literal["float", "int8"] = Field(
        default="float",
        description="ort-cpu, decoder-only: type of stored keys and values",
    )
    attention: Literal["float", "int8"] = Field(
        default="float",
        description="openvino, encoders of texts: type of both matrix products of attention",
    )
    cache_length: int | None = Field(
        default=None,
        ge=16,
        le=1 << 20,
        description="ort-cuda, tensorrt, decoder-only: fixed length of the caches in tokens, written in"
        " place; default: they grow",
    )
    tf32: bool = Field(
        default=False,
        description="ort-cuda: float32 matrix multiplications in TF32",
    )
    cuda_graph: bool = Field(
        default=False,
        description="ort-cuda, fixed shapes: launch all kernels of a call at once",
    )

    @property
    def graph_target(self) -> GraphTarget:
        """The target whose graphs are exported: `target`, or the one whose graphs it uses."""
        return cast("GraphTarget", graph_target(self.target))

    def makes_generation_graphs(self, task: str) -> bool:
        """Return whether models of `task` are also exported as graphs of the whole generation."""
        return self.generation_graph and self.target == "ort-cpu" and task_traits(task).generates

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """The settings of fixed shapes, without those that are dynamic."""
        return {name: size for name in FIXED_SIZES if (size := getattr(self, name)) is not None}

    @property
    def is_machine_dependent(self) -> bool:
        """Whether the artifact depends on the machine that produces it."""
        return bool(self.autotune) or self.threads == "autotune"

    @property
    def autotune_settings(self) -> AutotuneSettings:
        """The batch sizes and beams that autotune measures for."""
        return self.autotune if isinstance(self.autotune, AutotuneSettings) else AutotuneSettings()

    def autotune_for(self, batch_sizes: tuple[int, ...], num_beams: int | None) -> OnnxSettings:
        """Return the settings with these as defaults of `autotune`; unchanged without `autotune`."""
        if not self.autotune:
            return self
        asked = self.autotune_settings
        update = {
            "batch_sizes": asked.batch_sizes or batch_sizes,
            "num_beams": asked.num_beams or num_beams,
        }
        return self.model_copy(update={"autotune": asked.model_copy(update=update)})

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.target == "ort-cpu" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs; on the CPU ONNX Runtime converts to float32 at every operator. Set"
                " dtype: fp32",
                code="unsupported-dtype",
            )
        if self.target == "openvino" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs. With target openvino set dtype: fp32 or bf16",
                code="unsupported-dtype",
            )
        if self.target == "ort-cpu" and self.dtype == "bf16":
            raise SettingError(
                "dtype bf16 is for GPUs and OpenVINO; on the CPU ONNX Runtime has no bf16 matrix"
                " multiplication. Set target: openvino, or dtype: fp32",
                code="unsupported-dtype",
            )
        return self

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.autotune and self.target != "ort-cpu":
            raise SettingError(
                "autotune chooses between operators of ONNX Runtime on the CPU. Set target: ort-cpu, or"
                " remove autotune",
                code="unused-setting",
            )
        if self.threads is not None and self.target not in ("ort-cpu", "openvino"):
            raise SettingError(
                f"threads applies to graphs on the CPU, but target {self.target} is for GPUs. Remove threads",
                code="unused-setting",
            )
        if self.kv_cache == "int8" and self.target != "ort-cpu":
            raise SettingError(
                "kv_cache: int8 needs ONNX Runtime's attention on the CPU, but target is"
                f" {self.target}. Set kv_cache: float, or target: ort-cpu",
                code="unused-setting",
            )
        if self.attention == "int8" and (self.target, self.dtype) != ("openvino", "fp32"):
            raise SettingError(
                "attention: int8 needs target: openvino and dtype: fp32, but they are"
                f" {self.target} and {self.dtype}. Set attention: float",
                code="unused-setting",
            )
        if self.cache_length is not None and self.target not in ("ort-cuda", "tensorrt"):
            raise SettingError(
                "cache_length needs caches that are written in place, with target ort-cuda or tensorrt, but"
                f" target is {self.target}. Remove cache_length",
                code="unused-setting",
            )
        if self.target == "ort-tensorrt" and self.opset >= FUSED_OPSET:
            raise SettingError(
                f"opset {self.opset} has Attention as one operator, which TensorRT in ONNX Runtime refuses"
                f" where no kernel computes it whole. Set opset: {FUSED_OPSET - 1} or less, or target:"
                " tensorrt",
                code="unsupported-opset",
            )
        if self.tf32 and (self.target != "ort-cuda" or self.dtype != "fp32"):
            raise SettingError(
                "tf32 requires target: ort-cuda and dtype: fp32. Remove tf32", code="unused-setting"
            )
        if self.cuda_graph and self.target != "ort-cuda":
            raise SettingError(
                f"cuda_graph requires target: ort-cuda, but target is {self.target}. Remove cuda_graph",
                code="unused-setting",
            )
        if self.fixed_sizes and self.target == "ort-tensorrt":
            raise SettingError(
                f"{' and '.join(self.fixed_sizes)}: target ort-tensorrt builds engines for a range of sizes."
                " Set target: tensorrt, or the sizes of engine",
                code="settings-conflict",
            )
        if self.fixed_sizes and self.autotune:
            raise SettingError(
                f"autotune measures batches of several sizes, but {' and '.join(self.fixed_sizes)} is fixed."
                " Remove one of them",
                code="settings-conflict",
            )
        if self.engine is not None and self.target != "ort-tensorrt":
            raise SettingError(
                f"engine is for target ort-tensorrt, but target is {self.target}. Remove engine, or move it"
                " into a `tensorrt` step",
                code="unused-setting",
            )
        return self


def unsupported_cuda_graph(settings: OnnxSettings, task: str) -> str | None:
    """Return why calls of the graphs of `task` cannot be captured, or None."""
    traits = task_traits(task)
    if not settings.cuda_graph:
        return None
    if traits.generates or traits.modality == "arrays":
        return f"the graphs of {task} have no fixed shapes, which a CUDA graph requires. Remove it."
    required = FIXED_SIZES if traits.modality == "text" else FIXED_SIZES[:1]
    if missing := [name for name in required if getattr(settings, name) is None]:
        return f"a CUDA graph requires fixed shapes. Set {' and '.join(missing)}, or remove cuda_graph."
    return None


KV_CACHE_TASKS = tasks_with(architecture="decoder")
FLOAT_CACHE_HINT = "Set kv_cache: float."


def unsupported_sizes(settings: OnnxSettings, task: str) -> dict[str, str]:
    """Return by setting why the graphs of `task` cannot have a fixed size."""
    traits = task_traits(task)
    if settings.cache_length is not None and task not in KV_CACHE_TASKS:
        text = f"{task} has no caches of a language model (tasks {' and '.join(sorted(KV_CACHE_TASKS))})."
        return {"cache_length": f"{text} Remove it."}
    if traits.generates:
        fixed_size_tasks = set(tasks_with(architecture="encoder")) - set(
            tasks_with(modality="image-and-text")
        )
        reason = (
            f"the task is {task}, whose graphs append to caches that grow with each token. Fixed shapes are"
            f" for {', '.join(sorted(fixed_size_tasks))}. Remove it."
        )
        return dict.fromkeys(settings.fixed_sizes, reason)
    if traits.modality in ("arrays", "image-and-text"):
        reason = f"the graphs of {task} have a dynamic batch. Remove it."
        return dict.fromkeys(settings.fixed_sizes, reason)
    if traits.modality == "image" and settings.sequence_length is not None:
        text = f"an input of {task} has no tokens; its size is always fixed. Set batch_size only."
        return {"sequence_length": text}
    return {}


def windows_beyond_shape(
    settings: OnnxSettings, data: Mapping[str, Split], limit: int | None = None
) -> dict[str, str]:
    """Return by setting why windows of `data` do not fit into inputs or caches of a fixed length.

    limit: of the model's tokens; None: not known yet, so that only windows with a set length are checked.
    """
    fixed = {"cache_length": settings.cache_length, "sequence_length": settings.sequence_length}
    windows = [split.windows for split in data.values() if split.windows is not None]
    lengths = [item.length for item in windows if item.length is not None]
    lengths += [window_length(None, limit) for item in windows if item.length is None and limit is not None]
    longest = max(lengths, default=0)
    return {
        name: f"{length} has no room for windows of {longest} tokens. Set {name}: {longest}, or data:"
        f" {{windows: {{length: {length}}}}}."
        for name, length in fixed.items()
        if length is not None and longest > length
    }


def unsupported_attention(task: str) -> str | None:
    """Return why models of `task` do not support int8 attention, or None."""
    traits = task_traits(task)
    if traits.architecture == "encoder" and traits.modality == "text":
        return None
    return f"int8 attention is for encoders of texts; the task is {task}. Set attention: float."


def unsupported_task(task: str) -> str | None:
    """Return why models of `task` do not support int8 caches, or None."""
    if task in KV_CACHE_TASKS:
        return None
    return (
        "ONNX Runtime supports int8 caches only for decoder-only models (tasks"
        f" {' and '.join(sorted(KV_CACHE_TASKS))}); the task is {task}. {FLOAT_CACHE_HINT}"
    )


def unsupported_model(config: Mapping[str, Any]) -> str | None:
    """Return why the heads of a model with this config.json do not fit, or None, also if unknown.

    Families whose config does not contain the head width are checked at export.
    """
    family = find_family(config)
    for stack in family.stacks(config) if family is not None and family.architecture == "decoder" else ():
        for attention in stack.attentions:
            heads = config.get(attention.heads_key)
            hidden_size = family.hidden_size(config) if family else None
            width = config.get(attention.head_dim_key) if attention.head_dim_key else None
            if (
                attention.head_dim_key
                and width is None
                and isinstance(heads, int)
                and isinstance(hidden_size, int)
            ):
                width = hidden_size // heads
            if not isinstance(width, int) or family is None:
                continue
            rotary_dim = int(width * family.rotary_fraction(config)) if attention.rotary else 0
            if reason := unsupported_head_dim(width, rotary_dim):
                return reason
    return None


def unsupported_head_dim(head_dim: int, rotary_dim: int) -> str | None:
    """Return why heads of width `head_dim`, of which `rotary_dim` are rotated, do not fit, or None."""
    if supports_gqa(head_dim, rotary_dim):
        return None
    step, size = (16, rotary_dim) if rotary_dim else (8, head_dim)
    kind = "rotated parts of heads" if rotary_dim not in (0, head_dim) else "head sizes"
    return (
        f"int8 caches need ONNX Runtime's GroupQueryAttention, which supports {kind} of {step},"
        f" {2 * step}, {3 * step}, ..., but this model's is {size}. {FLOAT_CACHE_HINT}"
    )
