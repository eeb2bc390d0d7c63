"""The registered schemes, and queries on all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, did_you_mean
from smelt.quantization.groupwise import GROUP_SIZE
from smelt.quantization.scheme import (
    EXPORT_TARGETS,
    OptionValue,
    Scheme,
    SchemeOption,
    SchemeOptions,
    graph_target,
)
from smelt.quantization.schemes.additive import Additive
from smelt.quantization.schemes.affine import Int2, Int3, Int4, Int8Groupwise
from smelt.quantization.schemes.bitsandbytes import BnbInt8, BnbNf4
from smelt.quantization.schemes.float4 import Mxfp4, Pow2
from smelt.quantization.schemes.fp8 import Fp8
from smelt.quantization.schemes.int8 import Int8Dynamic
from smelt.quantization.schemes.int8_static import Int8Static
from smelt.quantization.schemes.kmeans4 import Kmeans4
from smelt.quantization.schemes.nvfp4 import Nvfp4
from smelt.quantization.schemes.ternary import Binary, Ternary

if TYPE_CHECKING:
    from smelt.quantization.scheme import Expansion, QuantizedGraph

_ALL_SCHEMES: tuple[Scheme, ...] = (
    Int8Dynamic(),
    Int8Static(),
    Int8Groupwise(),
    Fp8(),
    Nvfp4(),
    Int4(),
    Int3(),
    Int2(),
    Additive(),
    Kmeans4(),
    Pow2(),
    Mxfp4(),
    Ternary(),
    Binary(),
    BnbNf4(),
    BnbInt8(),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _ALL_SCHEMES}
# schemes that differ in their bits only, by these
SCHEMES_BY_BITS: dict[int, Scheme] = {scheme.bits: scheme for scheme in _ALL_SCHEMES if scheme.bits}
DEFAULT_SCHEME = Int8Dynamic.name
# schemes of ONNX Runtime's own quantizers: one scale for all activations of a layer
GRAPH_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.per_tensor_activations)
# of them, the one with ranges calibrated on samples
STATIC_SCHEME = next(name for name in GRAPH_SCHEMES if SCHEMES[name].requires_calibration)
# the scheme of imported 4-bit checkpoints: integers in groups, with a zero point
CHECKPOINT_SCHEME = Int4.name
# a width that every group size divides
_WIDTH = 4096


def find_scheme(name: object) -> Scheme:
    """Return the scheme called `name`.

    Raises:
        InputError: there is none.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        known_schemes = f"Known: {', '.join(SCHEMES)}.{did_you_mean(str(name), SCHEMES)}"
        raise InputError(f"unknown quantization scheme '{name}'. {known_schemes}", code="unknown-scheme")
    return SCHEMES[name]


def validate_scheme_options(scheme: Scheme, options: SchemeOptions) -> None:
    """Check the options of `scheme` in a stored structure, or of a caller.

    Raises:
        InputError: an option is unknown or missing, or its value is not allowed.
    """
    names = [option.name for option in scheme.option_specs]
    if set(options) != set(names):
        supported = ", ".join(names) or "no options"
        raise InputError(
            f"scheme {scheme.name} does not support the options {dict(options)}; supported: {supported}.",
            code="unsupported-scheme-options",
        )
    for option in scheme.option_specs:
        value = options[option.name]
        if not option.allows(value):
            expected = option.expected or f"one of {', '.join(map(format_option_value, option.allowed))}"
            raise InputError(
                f"{option.name.replace('_', ' ')} {value!r}; expected {expected}.",
                code="wrong-value",
                setting=option.name,
            )


def default_options(scheme: Scheme) -> dict[str, Any]:
    """Return the options of `scheme` that a recipe without options has."""
    return {option.name: option.default for option in scheme.option_specs}


def is_row_independent(scheme: Scheme, width: int, options: SchemeOptions) -> bool:
    """Return whether the weights and scales of a row of K = `width` inputs depend on that row only."""
    specs = scheme.stored_tensors(1, width, options).values()
    return not scheme.is_per_tensor(options) and all(tensor.per_row or tensor.calibrated for tensor in specs)


def can_learn_ranges(scheme: Scheme) -> bool:
    """Return whether weights in groups are integer steps of a scale that the range of a group defines."""
    has_groups = any(option.name == GROUP_SIZE.name for option in scheme.option_specs)
    has_ranges = scheme.supports_clipping and not scheme.requires_training
    return has_groups and has_ranges and scheme.learnable_scales


def schemes_by_option() -> dict[str, list[tuple[Scheme, SchemeOption]]]:
    """Return for each option name the schemes that have it, in the order of the schemes."""
    by_option: dict[str, list[tuple[Scheme, SchemeOption]]] = {}
    for scheme in SCHEMES.values():
        for option in scheme.option_specs:
            by_option.setdefault(option.name, []).append((scheme, option))
    return by_option


def bits_per_weight(
    scheme: Scheme, options: SchemeOptions, width: int = _WIDTH, rows: int | None = None
) -> float:
    """Return the stored bits per weight of a matrix, with scales, zero points and codebooks.

    A calibrated value is one number for a whole matrix and does not count.

    Args:
        scheme: of the matrix.
        options: its options.
        width: its inputs.
        rows: its outputs, which count where a tensor belongs to all rows; None: as many as inputs.
    """
    rows = width if rows is None else rows
    specs = scheme.stored_tensors(rows, width, options).values()
    return 8 * sum(tensor.size_bytes for tensor in specs if not tensor.calibrated) / (rows * width)


def supported_targets(schemes: Iterable[Scheme]) -> list[str]:
    """Return the export targets that support all of `schemes`."""
    scheme_names = list(schemes)
    return [
        target
        for target in EXPORT_TARGETS
        if all(unsupported_reason(scheme, target) is None for scheme in scheme_names)
    ]


def schemes_for_target(target: str) -> list[str]:
    """Return the names of the schemes that the export target supports."""
    return [name for name, scheme in SCHEMES.items() if unsupported_reason(scheme, target) is None]


def unsupported_reason(scheme: Scheme, target: str) -> str | None:
    """Return why the export target, or the one whose graphs it runs, cannot run `scheme`; None if it can."""
    return scheme.unsupported_targets.get(target) or scheme.unsupported_targets.get(graph_target(target))


def unsupported_scheme_options(scheme: Scheme, options: SchemeOptions, target: str) -> list[str]:
    """Return the options of `scheme` that the export target does not support, in recipe form.

    Args:
        scheme: one that the target supports.
        options: the known ones; others are ignored.
        target: of export.
    """
    required = scheme.required_options.get(graph_target(target), {})
    return [
        format_option(n, values)
        for n, values in required.items()
        if n in options and options[n] not in values
    ]


def supported_dtypes(schemes: Iterable[Scheme], target: str) -> list[str]:
    """Return the dtypes of a graph for the target in which the scales of all schemes keep their precision."""
    dtypes_of_schemes = [scheme.supported_dtypes.get(graph_target(target), ()) for scheme in schemes]
    return [
        "fp32",
        *(dtype for dtype in ("fp16", "bf16") if all(dtype in dtypes for dtypes in dtypes_of_schemes)),
    ]


def format_option(name: str, values: Iterable[OptionValue]) -> str:
    """Return an option with its values in recipe form."""
    return f"`{name}: {' or '.join(map(format_option_value, values))}`"


def format_option_value(value: OptionValue) -> str:
    """Return a value of an option in recipe form."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def owner_of_operator(node: Any, graph: QuantizedGraph) -> Scheme | None:
    """Return a scheme whose quantized operator `node` is; None if it is no quantized operator."""
    return next((scheme for scheme in SCHEMES.values() if scheme.owns_operator(node, graph)), None)


def replace_with_float_nodes(node: Any, graph: QuantizedGraph) -> list[Any] | None:
    """Return nodes that compute `node` with float activations; None where it belongs to no scheme."""
    scheme = owner_of_operator(node, graph)
    return None if scheme is None else scheme.float_activation_nodes(node)


def placeholder_expansions() -> dict[str, Expansion]:
    """Return the expansions of the placeholders of all schemes, by op type."""
    return {
        name: expansion
        for scheme in SCHEMES.values()
        for name, expansion in scheme.placeholder_expansions().items()
    }
