"""The stage `sparsify`: weights without structure, or n of each m, become zero and stay zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from smelt.compress.behind_codes import BEHIND_QUANTIZE, CodesBefore
from smelt.compress.sparsify.pattern import Pattern, read_pattern
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError, SettingError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need, Settings, StoredDtype
from smelt.families.registry import FAMILIES, blockless, find_family

if TYPE_CHECKING:
    from smelt.compress.calibration.rows import CalibrationRows
    from smelt.compress.sparsify.method import Method
    from smelt.runtime.models.streamed import StreamedModel

_DEFAULT_SPARSITY = 0.5


class SparsifySettings(Settings):
    """Settings of `sparsify`. Give at most one of sparsity and pattern; default sparsity: 0.5."""

    method: Literal["wanda", "sparsegpt", "magnitude", "random"] = Field(
        default="sparsegpt",
        description="wanda: by weight times input norm; sparsegpt: also compensates the error; magnitude: by"
        " weight",
    )
    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of zeros in each layer; default 0.5 without pattern",
    )
    pattern: str | None = Field(
        default=None, description='"2:4" keeps 2 of each 4 neighbouring inputs of an output'
    )
    targets: list[Literal["attention", "ffn"]] = Field(
        default=["attention", "ffn"],
        min_length=1,
        description="linear layers of attention, of the feed-forward part",
    )
    calibration_samples: int = Field(
        default=128, ge=1, description="for wanda and sparsegpt; from calibration data, else train"
    )
    dtype: StoredDtype = "keep"

    @field_validator("pattern")
    @classmethod
    def _reads(cls, value: str | None) -> str | None:
        if value is not None:
            read_pattern(value)
        return value

    @model_validator(mode="after")
    def _one(self) -> SparsifySettings:
        if self.sparsity is not None and self.pattern is not None:
            raise SettingError("give one of sparsity and pattern, not both", code="settings-conflict")
        return self

    @property
    def zeros(self) -> Pattern:
        """The pattern of the zeros."""
        if self.pattern is None:
            return Pattern(self.sparsity or _DEFAULT_SPARSITY)
        kept, group = read_pattern(self.pattern)
        return Pattern(1 - kept / group, kept, group)

    @property
    def reads_rows(self) -> bool:
        """Whether the method uses the inputs of layers."""
        return self.method in ("wanda", "sparsegpt")


class Sparsify:
    """Set the weights of each linear layer of the blocks to zero that matter least.

    Nothing gets smaller or faster by that on the runtimes that smelt exports to: zeros are stored and
    multiplied as other weights are, and a compressed file is what becomes smaller. It is there for hardware
    and kernels that skip zeros (2:4), and to be compared with. Embeddings, norms, biases and output heads
    stay whole. The blocks are gone through one by one, each on what the sparse ones before it give. The zeros
    last: finetune and distill keep them, prune cuts around them; factorize and quantize make other matrices,
    which have none. Behind `quantize` weights become the code of zero.

        - sparsify: {method: sparsegpt, sparsity: 0.5}
        - sparsify: {method: wanda, pattern: "2:4"}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "sparsify"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "wanda: Sun et al. 2024, arXiv:2306.11695; sparsegpt: Frantar & Alistarh 2023, arXiv:2301.00774;"
        " magnitude: Han et al. 2015, arXiv:1506.02626"
    )
    version: ClassVar[int] = 1
    settings_type: ClassVar[type[SparsifySettings]] = SparsifySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def leaves(cls, settings: SparsifySettings) -> frozenset[str]:
        """Return what later steps may lose: zeros, and n of each m neighbouring inputs."""
        return frozenset({"zeros"} if settings.pattern is None else {"zeros", "pattern"})

    @classmethod
    def unfit_for_codes(cls, settings: SparsifySettings, codes: CodesBefore) -> str | None:
        """Return why weights of a quantized model cannot become zero, and what to do; None where they can."""
        return codes.units_held(cls.name) or codes.zeros_lacking()

    @classmethod
    def needs_with(cls, settings: SparsifySettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: wanda and sparsegpt look at rows, those for calibration if there are any."""
        if not settings.reads_rows:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_model(
        cls, settings: SparsifySettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        if (lack := blockless(config)) is not None:
            return [mistake("does-not-fit-model", f"{lack}, whose matrices it thins out.")], config
        if find_family(config) is not None:
            return [], config
        known = ", ".join(FAMILIES)
        return [
            mistake(
                "unsupported-family",
                f"the blocks of a {config.get('model_type')} model are not known. Known: {known}.",
            )
        ], config

    def __call__(self, src: Artifact, settings: SparsifySettings, ctx: Context) -> None:
        """Write the sparse model into `ctx.out`."""
        from smelt.compress.calibration.rows import calibration_rows
        from smelt.compress.quantize.requantize import load_changeable
        from smelt.compress.train.state import threads
        from smelt.runtime.models.checkpoint import save_model
        from smelt.runtime.models.streamed import open_streamed

        streamed = open_streamed(src.path, ctx.out, settings.dtype) if _streams(ctx) else None
        codes = None
        if streamed is not None:
            model, edits = streamed.model, streamed.edits
        else:
            model, edits, codes = load_changeable(src, ctx, self.name, grids_stay=True)
        if codes is not None and (lack := self.unfit_for_codes(settings, codes.before)) is not None:
            raise InputError(f"sparsify: {lack}", code=BEHIND_QUANTIZE)
        mistakes, _ = self.check_model(settings, model.config.to_dict())
        if mistakes:
            raise InputError(f"sparsify: {mistakes[0].message}", code=mistakes[0].code)
        with threads(ctx.threads):
            rows = None
            if settings.reads_rows:
                rows = calibration_rows(model, src, settings.calibration_samples, ctx, self.name, padded=True)
                ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
            _sparsify(model, rows, settings, ctx, streamed)
        if codes is not None:
            edits = codes.put_back(model, edits, ctx)
        if streamed is None:
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
            if codes is not None:
                codes.write_floats(model, ctx)
        else:
            ctx.warnings.extend(streamed.finish(edits))


def _streams(ctx: Context) -> bool:
    """Say whether a large model is taken block by block: where torch computes on the CPU."""
    from smelt.runtime.backends.device import torch_device

    return torch_device(ctx.device) == "cpu"


def _sparsify(
    model: Any,
    rows: CalibrationRows | None,
    settings: SparsifySettings,
    ctx: Context,
    streamed: StreamedModel | None,
) -> None:
    """Sparsify the blocks of `model` in place; say what became of them in `ctx`."""
    import torch

    from smelt.compress.calibration.blocks import drive, nothing
    from smelt.compress.sparsify.layers import Sparsifier, layers_of
    from smelt.families.walk import blocks_of

    draw = torch.Generator().manual_seed(ctx.seed)
    sparsifier = Sparsifier(model, _method(settings), settings.zeros, draw)
    enter, leave = (streamed.enter, streamed.leave) if streamed else (nothing, nothing)
    if rows is None:
        for block in blocks_of(model):
            enter(block)
            sparsifier.sparsify(layers_of(model, block, settings.targets), None)
            leave(block)
    else:
        for step in drive(model, rows, ctx, stage="sparsify", enter=enter, leave=leave):
            sparsifier.sparsify(layers_of(model, step.block, settings.targets), step.observe)
    sparsifier.tell(rows, ctx)


def _method(settings: SparsifySettings) -> Method:
    from smelt.compress.sparsify.at_random import Random
    from smelt.compress.sparsify.magnitude import Magnitude
    from smelt.compress.sparsify.sparsegpt import SparseGpt
    from smelt.compress.sparsify.wanda import Wanda

    methods: tuple[type[Method], ...] = (Wanda, SparseGpt, Magnitude, Random)
    return next(method() for method in methods if method.name == settings.method)
