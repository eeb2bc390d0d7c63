"""What a recipe can say of the onnx stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.export.tune.settings import Tune
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.schemes.scheme import graphs_for

if TYPE_CHECKING:
    from smelt.runtime.layers.emit import Target


class OnnxSettings(Settings):
    """Where the graphs will run and in which precision.

    target: ort-cpu (ONNX Runtime's fused and int8 operators), ort-cuda, tensorrt or openvino (standard
    operators); ort-tensorrt and ort-tensorrt-rtx: TensorRT's graphs, for ONNX Runtime's providers of it,
    which build engines when a graph is opened. dtype: fp16 and bf16 are for GPUs; norms, and blocks that
    overflow in fp16, stay float32; with openvino the file stays float32, and OpenVINO computes in bf16.
    simplify: run onnxsim, keep the result only where it computes the same. opset: of the standard operators.
    threads: how many the artifact takes where its user does not say; `tune` measures 1 to all cores that this
    process may use. tune: choose by measuring, on this machine, as which operator a quantized product leaves
    where its scheme leaves a choice; for greedy calls of one text, or `tune: {batch_size: 8, beams: 4}`.
    loop: also write the whole generation as one graph, which is what smelt then runs; on ort-cpu, for models
    that generate. engine: what TensorRT's providers are told, `engine: {max_batch_size: 16, lengths:
    {opt: 32, max: 128}}`. kv_cache: int8 keeps the keys and values of a decoder-only model in a quarter of
    the bytes, by scales per channel that are found on rows of `calibration`, else `train`; on ort-cpu.
    tf32: on ort-cuda, let float32 matrix multiplications use TF32 (faster on Ampere and newer, 10 bits of
    fraction); the comparison with the model is in float32 all the same.
    """

    target: Literal["ort-cpu", "ort-cuda", "tensorrt", "openvino", "ort-tensorrt", "ort-tensorrt-rtx"] = (
        "ort-cpu"
    )
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    simplify: bool = True
    opset: int = Field(default=20, ge=19, le=23)
    loop: bool = True
    tune: Tune | bool = False
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["tune"] | None = None
    engine: ProviderSettings | None = None
    kv_cache: Literal["float", "int8"] = "float"
    tf32: bool = False

    # A setting that came later: as it is by default, it is not written down, and changes no key.
    unsaid: ClassVar[frozenset[str]] = frozenset({"kv_cache", "tf32"})

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        plain = {name: type(self).model_fields[name].default for name in self.unsaid}
        return {name: value for name, value in found.items() if name not in plain or value != plain[name]}

    @property
    def graphs_of(self) -> Target:
        """The target whose graphs are made: that of `target`, or the one that it shares graphs with."""
        return cast("Target", graphs_for(self.target))

    @property
    def measures(self) -> bool:
        """Whether the artifact depends on the machine that makes it."""
        return bool(self.tune) or self.threads == "tune"

    @property
    def tuned_for(self) -> Tune:
        """For which use what is measured is chosen."""
        return self.tune if isinstance(self.tune, Tune) else Tune()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.target == "ort-cpu" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs; on the CPU ONNX Runtime converts back at every step",
                code="unsupported-dtype",
            )
        if self.target == "openvino" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs; with target openvino give fp32 or bf16", code="unsupported-dtype"
            )
        if self.target == "ort-cpu" and self.dtype == "bf16":
            raise SettingError(
                "dtype bf16 is for GPUs and OpenVINO: on the CPU ONNX Runtime has no products in it; give"
                " target: openvino, or dtype: fp32",
                code="unsupported-dtype",
            )
        if self.tune and self.target != "ort-cpu":
            raise SettingError(
                "tune chooses between operators of ONNX Runtime on the CPU; set target: ort-cpu, or remove"
                " it",
                code="unused-setting",
            )
        if self.threads is not None and self.target not in ("ort-cpu", "openvino"):
            raise SettingError(
                f"threads is for graphs that run on the CPU; target {self.target} is for GPUs: remove it",
                code="unused-setting",
            )
        if self.kv_cache == "int8" and self.target != "ort-cpu":
            raise SettingError(
                "kv_cache: int8 is an input of ONNX Runtime's attention on the CPU, and target is"
                f" {self.target}: set kv_cache: float, or target: ort-cpu",
                code="unused-setting",
            )
        if self.tf32 and (self.target != "ort-cuda" or self.dtype != "fp32"):
            raise SettingError("tf32 is for target ort-cuda and dtype fp32; remove it", code="unused-setting")
        if self.engine is not None and self.target not in PROVIDERS:
            raise SettingError(
                f"engine is for target ort-tensorrt and ort-tensorrt-rtx, and target is {self.target}: remove"
                " it, or put it into a `tensorrt` step",
                code="unused-setting",
            )
        if self.target == "ort-tensorrt-rtx" and self.engine and (said := self.engine.unknown_to_rtx()):
            raise SettingError(
                f"TensorRT for RTX has no option for engine: {{{', '.join(said)}}}: remove it",
                code="unsupported-setting",
            )
        return self
