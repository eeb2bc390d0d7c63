"""The stage `quantize`: one scheme for the linear layers, one for the matrices of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.quantize.scheme_table import scheme_table
from smelt.compress.quantize.settings import AUTO, Budget, QuantizeSettings
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Settings
from smelt.core.text import count
from smelt.families.registry import blockless
from smelt.runtime.schemes.registry import SCHEMES
from smelt.runtime.schemes.scheme import Scheme

if TYPE_CHECKING:
    from smelt.compress.calibration.rows import CalibrationRows
    from smelt.compress.quantize.coding import Coder, Fit
    from smelt.compress.quantize.planned import Planned
    from smelt.runtime.schemes.scheme import Codes


_FLOAT = "Leave the step out, and export its float weights, for GPUs in fp16 (onnx: {dtype: fp16})."


class Quantize:
    """Turn linear layers and word embeddings into integer codes and scales.

    torch then computes what the runtime will compute. An embedding and an output head that are one matrix
    stay one. Where a scheme needs training afterwards, put `distill` after this step: it trains through the
    codes.

        - quantize: {scheme: int8-dynamic, skip: ["*.lm_head"]}
        - quantize: {scheme: int4, group_size: 32, symmetric: false}
        - quantize: {scheme: int4, method: gptq, clip: mse}
        - quantize: {scheme: int4, method: awq, clip: awq}
        - quantize: {scheme: int4, method: hqq}
        - quantize: {scheme: int2, method: gptq, group_size: 32, symmetric: false}
        - quantize: {scheme: ternary, granularity: row}
        - quantize: {scheme: binary, group_size: 64}
        - quantize: {scheme: int8-static, range: percentile, skip: auto}
        - quantize: {scheme: int8-static, smooth: 0.5}
        - quantize: {scheme: bnb-nf4}
    """

    name: ClassVar[str] = "quantize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = "; ".join(
        [
            *dict.fromkeys(scheme.source for scheme in SCHEMES.values()),
            "smooth: Xiao et al. 2023, arXiv:2211.10438",
            "gptq: Frantar et al. 2023, arXiv:2210.17323",
            "awq: Lin et al. 2023, arXiv:2306.00978",
            "hqq: Badri & Shaji 2023, https://mobiusml.github.io/hqq_blog/",
        ]
    )
    version: ClassVar[int] = 2
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def more_help(cls) -> str:
        """Return what `smelt stages quantize` says of the schemes."""
        return "\n\n".join([scheme_table(), *(_help_of(scheme) for scheme in SCHEMES.values())])

    @classmethod
    def leaves(cls, settings: QuantizeSettings) -> frozenset[str]:
        """Return what later steps may lose: codes that are not the nearest."""
        return frozenset() if settings.method == "nearest" else frozenset({"codes"})

    @classmethod
    def needs_with(cls, settings: QuantizeSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: rows where activations are looked at, for calibration if there are any."""
        if not settings.reads_rows:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_model(
        cls, settings: QuantizeSettings, config: Mapping[str, Any]
    ) -> tuple[list[tuple[str, str]], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        lack = blockless(config)
        return [] if lack is None else [("", f"{lack}; it codes linear layers alone. {_FLOAT}")], config

    def __call__(self, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
        """Quantize `src` into `ctx.out`."""
        from smelt.compress.quantize.planned import plan_layers, quantize_layers, unused_patterns
        from smelt.compress.train.state import threads
        from smelt.runtime.models.checkpoint import load_model, save_model
        from smelt.runtime.models.stored_dtype import weight_bytes

        model, edits = load_model(src.path)
        for _, message in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"quantize: {message}")
        if any(edit["op"] == "quantize" for edit in edits):
            raise InputError(
                f"{src.path}: this model is already quantized; quantize it once, after all other steps."
            )
        layers = plan_layers(model, settings)
        ranges: dict[int, float] = {}
        codes: dict[int, Codes] = {}
        scaled: list[dict[str, Any]] = []
        with threads(ctx.threads):
            if settings.reads_rows and layers:
                layers, ranges, codes, scaled = _look(model, layers, src, settings, ctx)
            new = scaled + quantize_layers(model, layers, ranges, _coders(settings, codes))
        if not any(edit["op"] == "quantize" for edit in new):
            raise InputError(f"quantize: the patterns in skip {settings.skip} leave no layer to quantize.")
        kept = unused_patterns(model, settings.patterns)
        if kept:
            ctx.warnings.append(f"skip: no layer is named {', '.join(kept)}")
        ctx.warnings.extend(save_model(model, edits + new, ctx.out, src.path))
        ctx.facts.update(
            facts_of(model), bytes_before=weight_bytes(src.path), bytes_after=weight_bytes(ctx.out)
        )


def _look(
    model: Any, layers: list[Planned], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> tuple[list[Planned], dict[int, float], dict[int, Codes], list[dict[str, Any]]]:
    """Run `model` over real rows; return the layers to quantize, ranges of their activations, codes, edits.

    Where codes were decided, the weights of `model` are what they stand for, or nearly.
    """
    from smelt.compress.calibration.rows import calibration_rows
    from smelt.compress.quantize.damage import damages, sensitive
    from smelt.compress.quantize.observed import ENOUGH_TOKENS, ranges_of
    from smelt.compress.quantize.planned import require_weights
    from smelt.compress.quantize.smooth import smooth
    from smelt.runtime.models.stored_dtype import stored_types

    require_weights(layers)
    rows = calibration_rows(model, src, settings.rows, ctx, "quantize")
    ctx.facts["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
    ranges: dict[int, float] = {}
    if (settings.observes or settings.smooth is not None) and rows.tokens < ENOUGH_TOKENS:
        ctx.warnings.append(_too_few(rows, settings))
    if settings.smooth is not None:
        smooth(model, layers, rows, settings.smooth, stored_types(src.path).of, ctx)
    codes: dict[int, Codes] = {}
    edits: list[dict[str, Any]] = []
    if settings.method == "awq":
        from smelt.compress.quantize.methods.awq import awq

        cut = settings.clip == "awq"
        layers, edits, codes = awq(model, layers, rows, cut, stored_types(src.path).of, ctx)
    if settings.observes:
        ranges = ranges_of(model, layers, rows, settings, ctx)
        unseen = [layer.name for layer in layers if layer.observes and layer.weight not in ranges]
        if unseen:
            ctx.warnings.append(f"quantize: no row reaches {', '.join(unseen)}, which stay float")
            layers = [layer for layer in layers if layer.name not in unseen]
    if settings.damage_rows and (settings.observes or settings.smooth is not None or AUTO in settings.skip):
        few = rows.some(settings.damage_rows)
        found = damages(model, layers, ranges, few, ctx)
        ctx.facts["damage"] = {name: float(f"{value:.3g}") for name, value in found.items()}
        ctx.facts["damage_rows"] = few.rows
        stay = sensitive(found, settings.budget or Budget()) if AUTO in settings.skip else []
        layers = [layer for layer in layers if layer.name not in stay]
    if settings.method == "gptq":
        from smelt.compress.quantize.methods.gptq import gptq

        codes = gptq(model, layers, rows, _fit(settings), ctx)
    return layers, ranges, codes, edits


def _fit(settings: QuantizeSettings) -> Fit:
    from smelt.compress.quantize.coding import plain_fit
    from smelt.compress.quantize.methods.clip import percentile_grid, searched_grid
    from smelt.compress.quantize.methods.hqq import half_quadratic_grid

    if settings.method == "hqq":
        return half_quadratic_grid
    if settings.clip == "percentile":
        return partial(percentile_grid, settings.percentile)
    return searched_grid if settings.clip == "mse" else plain_fit


def _coders(settings: QuantizeSettings, codes: Mapping[int, Codes]) -> Callable[[Planned], Coder]:
    """Return what gives each layer its coder: what was decided on rows, else the nearest on its grid."""
    from smelt.compress.quantize.coding import nearest_on

    fit = _fit(settings)

    def coder_of(layer: Planned) -> Coder:
        decided = codes.get(layer.weight)
        return partial(nearest_on, fit) if decided is None else lambda weight, scheme, options: decided

    return coder_of


def _too_few(rows: CalibrationRows, settings: QuantizeSettings) -> str:
    """Return what to say of rows with too few tokens."""
    from smelt.compress.quantize.observed import ENOUGH_TOKENS

    what, why = "ranges of activations", "larger values in other texts will be cut off"
    if not settings.observes:
        what, why = "largest activations of each channel", "other texts may have larger ones"
    return (
        f"quantize: the {what} were found on {count(rows.rows, 'row')} of {rows.origin}, which"
        f" {'has' if rows.rows == 1 else 'have'} {count(rows.tokens, 'token')}; {why}. Give"
        f" {ENOUGH_TOKENS:,} tokens or more: raise rows, or name more rows with data:"
        " {calibration: FILE}."
    )


def _help_of(scheme: Scheme) -> str:
    tables = "" if scheme.tables else f"; embeddings and output layer become {scheme.vocabulary}"
    packages = " and ".join(f"{name} {oldest}" for name, oldest in scheme.packages.items())
    needs = f"; needs the package {packages} or later" if packages else ""
    return f"{scheme.name}: {scheme.summary}{tables}{needs}."


def facts_of(model: Any) -> dict[str, Any]:
    """Return what the report should tell of a quantized model.

    `bits_per_weight` counts codes, scales and zero points of the quantized matrices, each once;
    `padded_layers` are those whose last group is filled up, because their inputs are no multiple of it.
    """
    from torch import nn

    from smelt.runtime.layers.quantized import QuantizedLinear, is_quantized, matrix_bytes

    layers = [(name, m) for name, m in model.named_modules() if is_quantized(m)]
    linears = [(name, m) for name, m in layers if isinstance(m, QuantizedLinear)]
    matrices = {id(m.matrix): m.matrix for _, m in layers}
    bits = 8 * matrix_bytes(nn.ModuleList(matrices.values()))
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices.values())
    return {
        "linear_layers": len(linears),
        "embeddings": len(layers) - len(linears),
        "float_linear_layers": [n for n, m in model.named_modules() if isinstance(m, nn.Linear)],
        "padded_layers": [name for name, m in linears if _is_padded(m.matrix)],
        "bits_per_weight": round(bits / weights, 3),
    }


def _is_padded(matrix: Any) -> bool:
    """Say whether the last group of a matrix is filled up."""
    return bool(matrix.width % matrix.scheme.group(matrix.width, matrix.options))
