"""Build one TensorRT engine from one ONNX file, for ranges of shapes, and explain every failure.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api). Networks are
strongly typed, so no precision is set here: the ONNX file defines it.

An engine accepts any shape between a profile's min and max and is fastest at its opt. Inputs that share a
dimension (both masks and ids have `length`) get the same sizes, because shapes are made from one range per
dimension name.

Messages of TensorRT's parser and builder are explained, with what to do. The parser reports a code, an
operator and a description that is often the text of an assertion or just `false`; the builder writes lines to
the log. Observed with TensorRT 11.4.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smelt.core.errors import RunError, did_you_mean
from smelt.core.messages import Message, warning
from smelt.export.settings import HardwareCompatibility, WeightStorage
from smelt.export.tensorrt.engine_summary import inspect_engine, summarize_network
from smelt.generation.backend import PAST_PREFIX
from smelt.runtimes.tensorrt_engine import current_gpu, make_logger
from smelt.stage import Progress

_ANY_OPERATOR = "*"
_REEXPORT_HINT = "Export again with onnx: {target: tensorrt}."
_QDQ_HINT = "TensorRT supports int8 only as QuantizeLinear/DequantizeLinear pairs. " + _REEXPORT_HINT

_INTEGER_CODE, _FOREIGN_CODE = "tensorrt-integer-operator", "tensorrt-foreign-operator"


class Explanation(NamedTuple):
    """code: of the kind of error. text: the cause and what to do."""

    code: str
    text: str


# (code, operator) -> explanation; the operator `*` matches all others.
_BY_CODE: dict[tuple[str, str], Explanation] = {
    ("UNSUPPORTED_NODE", "DynamicQuantizeLinear"): Explanation(
        "tensorrt-dynamic-quantization", "activations are quantized at run time. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "MatMulInteger"): Explanation(
        _INTEGER_CODE, "an integer matrix multiplication of ONNX Runtime. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "ConvInteger"): Explanation(
        _INTEGER_CODE, "an integer convolution of ONNX Runtime. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "QLinearMatMul"): Explanation(
        _INTEGER_CODE, "a quantized operator (QOperator format). " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "QLinearConv"): Explanation(
        _INTEGER_CODE, "a quantized operator (QOperator format). " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "MatMulNBits"): Explanation(
        _FOREIGN_CODE, "4-bit weights in ONNX Runtime's format. " + _REEXPORT_HINT
    ),
    ("UNSUPPORTED_NODE", "DynamicQuantizeMatMul"): Explanation(
        _FOREIGN_CODE, "an operator of ONNX Runtime only. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", _ANY_OPERATOR): Explanation(
        "tensorrt-missing-operator", "TensorRT has no such operator. " + _REEXPORT_HINT
    ),
    ("UNSUPPORTED_NODE_ATTR", _ANY_OPERATOR): Explanation(
        "tensorrt-attribute", "TensorRT does not support this operator with these attributes."
    ),
    ("UNSUPPORTED_NODE_INPUT", _ANY_OPERATOR): Explanation(
        "tensorrt-input", "TensorRT does not support this operator with these inputs."
    ),
    ("UNSUPPORTED_NODE_DATATYPE", _ANY_OPERATOR): Explanation(
        "tensorrt-refused-type",
        "TensorRT does not support this operator with this data type."
        " Precision is decided at export: onnx: {target: tensorrt, dtype: fp32 or fp16}.",
    ),
    ("UNSUPPORTED_NODE_DYNAMIC", _ANY_OPERATOR): Explanation(
        "tensorrt-dynamic-shape", "TensorRT does not support this operator with a dynamic shape."
    ),
    ("UNSUPPORTED_NODE_SHAPE", _ANY_OPERATOR): Explanation(
        "tensorrt-shape", "TensorRT does not support this operator with this shape."
    ),
    ("MODEL_DESERIALIZE_FAILED", _ANY_OPERATOR): Explanation(
        "damaged-file", "the file is truncated or not an ONNX file. Run again with --rebuild."
    ),
    ("INVALID_GRAPH", _ANY_OPERATOR): Explanation("invalid-graph", "the graph is not valid ONNX."),
    ("REFIT_FAILED", _ANY_OPERATOR): Explanation(
        "tensorrt-refit-failed", "weights could not be replaced in the engine."
    ),
}
_PARSER_FAILED = Explanation("tensorrt-parser-failed", "TensorRT cannot parse it.")
# part of a description or a log line -> explanation; the first match is used
_BY_TEXT: tuple[tuple[str, Explanation], ...] = (
    (
        "Non-zero zero point",
        Explanation(
            "tensorrt-zero-point",
            "asymmetric quantization; TensorRT requires zero point 0. " + _REEXPORT_HINT,
        ),
    ),
    (
        "has type Int32 but must have type",
        Explanation(
            "tensorrt-quantized-bias",
            "a quantized bias; TensorRT supports quantized weights and activations only. " + _REEXPORT_HINT,
        ),
    ),
    (
        "must have same input types",
        Explanation(
            "tensorrt-mixed-types",
            "two data types meet in one operator; a Cast is missing. Precision is decided at export: "
            + _REEXPORT_HINT,
        ),
    ),
    (
        "Plugin not found",
        Explanation(_FOREIGN_CODE, "an operator that is not in the ONNX standard. " + _REEXPORT_HINT),
    ),
    (
        "no optimization profile has been defined",
        Explanation(
            "tensorrt-no-profile",
            "the graph has dynamic inputs, but their lengths are not known. Set tensorrt: {lengths: ...}.",
        ),
    ),
    (
        "is missing dimensions in profile",
        Explanation(
            "tensorrt-profile-missing-input",
            "an input of the graph has no entry in the optimization profile.",
        ),
    ),
    (
        "values are not self-consistent",
        Explanation(
            "tensorrt-profile-conflict",
            "inputs that share a dimension have different sizes in the profile.",
        ),
    ),
    (
        "Cuda failure",
        Explanation(
            "cuda-failed", "CUDA failed. Check that nvidia-smi works and that the driver is new enough."
        ),
    ),
    (
        "out of memory",
        Explanation(
            "out-of-memory",
            "out of GPU memory. Lower tensorrt: {workspace_mib: ...} or max_batch_size.",
        ),
    ),
    (
        "insufficient workspace",
        Explanation(
            "tensorrt-small-workspace",
            "no kernel fits into the workspace. Raise tensorrt: {workspace_mib: ...}.",
        ),
    ),
    (
        "Could not find any implementation",
        Explanation("tensorrt-no-kernel", "no kernel computes this node on this GPU within the workspace."),
    ),
)


# part of a warning -> explanation; the engine is built nevertheless
_WARNINGS: tuple[tuple[str, Explanation], ...] = (
    (
        "kMAX values are not self-consistent",
        Explanation(
            "tensorrt-profile-conflict",
            "the largest sizes of the profile do not match, so inputs of that size may fail. Lower"
            " tensorrt: {lengths: ...} or max_new_tokens.",
        ),
    ),
    (
        "layernorm after self-attention with FP16",
        Explanation(
            "tensorrt-norm-in-half",
            "a norm is computed in fp16, where the squares of values above 256 are infinite. Compare the"
            " scores with those of dtype: fp32.",
        ),
    ),
)


@dataclass(frozen=True)
class ParserError:
    """One error of TensorRT's ONNX parser, as read from its `IParserError`."""

    code: str
    description: str
    node: str
    operator: str


def explain_parser_error(error: ParserError, graph: str) -> Message:
    """Return a message for a parser error: the node, the cause and what to do."""
    node_text = f"node '{error.node}' ({error.operator}): " if error.node or error.operator else ""
    meaning = (
        _explanation_for_text(error.description)
        or _BY_CODE.get((error.code, error.operator))
        or _BY_CODE.get((error.code, _ANY_OPERATOR))
        or _PARSER_FAILED
    )
    return _rejection_message(
        meaning.code, f"{node_text}{meaning.text}{_quote(error.code, error.description)}", graph
    )


def explain_log(lines: Iterable[str], graph: str) -> Message:
    """Return the explanation of the log's errors, or the lines themselves if none is known."""
    unique_lines = list(dict.fromkeys(line for line in lines if line))
    for line in unique_lines:
        meaning = _explanation_for_text(line)
        if meaning is not None:
            return _rejection_message(meaning.code, f"{meaning.text}{_quote('builder', line)}", graph)
    log = " / ".join(unique_lines[:3]) or "(empty log)"
    text = f"TensorRT could not build an engine. Its log: {log}"
    return _rejection_message("tensorrt-build-failed", text, graph)


def explain_warning(line: str) -> Message:
    """Return the explanation of a builder warning, or the line itself if none is known."""
    meaning = next((meaning for part, meaning in _WARNINGS if part in line), None)
    if meaning is None:
        return warning("tensorrt-warning", f"TensorRT warned: {line}")
    return warning(meaning.code, f"{meaning.text}{_quote('builder', line)}")


def _rejection_message(code: str, text: str, graph: str) -> Message:
    return Message(code=code, severity="error", message=text, file=graph)


def _explanation_for_text(text: str) -> Explanation | None:
    lower_text = text.lower()
    return next((meaning for part, meaning in _BY_TEXT if part.lower() in lower_text), None)


def _quote(code: str, text: str) -> str:
    """Return TensorRT's own text, as a search term; empty for `false` and for no text."""
    text = " ".join(text.split())
    return f" [{code}]" if text in ("", "false") else f" [{code}: {text[:200]}]"


@dataclass(frozen=True)
class SizeRange:
    """The minimum, typical and maximum size of one dimension."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise RunError(
                f"optimization profile: min <= opt <= max is required, got {self.min}, {self.opt},"
                f" {self.max}",
                code="wrong-value",
            )


# Names that exporters use for the same dimension; the key is smelt's own name.
DIMENSION_NAMES: dict[str, tuple[str, ...]] = {
    "batch": ("batch", "batch_size"),
    "input": ("length", "encoder_length", "sequence_length", "encoder_sequence_length"),
    "past": ("past_length", "past_sequence_length", "past_decoder_sequence_length"),
    "total": ("total_sequence_length",),
}
# Scalars that decide shapes: their profile lists values; 0 requests all.
VALUE_INPUTS: dict[str, str] = {"num_logits_to_keep": "input"}
ProfileShapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def round_up(value: float, multiple: int = 8) -> int:
    """Return the next multiple of 8, which suits tensor cores."""
    return -(-int(-(-value // 1)) // multiple) * multiple


def input_range(lengths: Sequence[int], percentile: float, limit: int) -> SizeRange:
    """Return the range of token counts: from 1, opt the median, max `percentile` or `limit`."""
    import numpy as np

    highest = min(limit, round_up(float(np.percentile(lengths, percentile))))
    return SizeRange(1, max(1, min(highest, int(np.percentile(lengths, 50)))), max(1, highest))


def past_range(output_lengths: Sequence[int], max_new_tokens: int, limit: int) -> SizeRange:
    """Return the range of the decoder's cache: empty at the first step, max one below the longest output."""
    import numpy as np

    longest = max(0, min(max_new_tokens, limit) - 1)
    # averaged over the steps of a sentence, the cache is half as long as the sentence
    return SizeRange(0, min(longest, max(1, int(np.percentile(output_lengths, 50)) // 2)), longest)


def causal_ranges(
    prompt: int, max_new_tokens: int, limit: int, longest_prompt: int | None = None, usual_prompt: int = 1
) -> dict[str, SizeRange]:
    """Return the ranges of a decoder-only graph: new tokens (`input`), cached tokens (`past`), their sum.

    One profile serves prompts and single tokens. Its opt is one token after half of the longest text, because
    almost all calls are of that kind. TensorRT requires opt and max to add up, so the mask may be longer than
    any text: with an input of maximum length the cache holds at most `past` tokens. In a profile with its opt
    at prompts (`usual_prompt` above 1) the cache is empty at opt.

    Args:
        prompt: largest number of input tokens in one call.
        max_new_tokens: largest number of tokens generated after a prompt.
        limit: positions of the model.
        longest_prompt: of any profile, if there are several; each has the cache of the longest text.
        usual_prompt: number of input tokens at opt.
    """
    longest_input, longest = max(1, min(prompt, limit)), max(1, min(longest_prompt or prompt, limit))
    max_past = max(1, min(limit, longest + max_new_tokens) - 1)
    opt = min(usual_prompt, longest_input)
    typical_past = max(1, max_past // 2) if opt == 1 else 0
    total = SizeRange(1, typical_past + opt, longest_input + max_past)
    return {
        "input": SizeRange(1, opt, longest_input),
        "past": SizeRange(0, typical_past, max_past),
        "total": total,
    }


def profile_shapes(model: Any, ranges: Mapping[str, SizeRange], graph: str) -> ProfileShapes:
    """Return min, opt and max shape of every dynamic input of an ONNX model, and those of `VALUE_INPUTS`.

    The batch of a graph with a cache is the range `rows`, if there is one: each beam of a text is a row.

    Raises:
        RunError: a dynamic dimension has no name, or one that is not in `DIMENSION_NAMES`.
    """
    if "rows" in ranges and any(value.name.startswith(PAST_PREFIX) for value in model.graph.input):
        ranges = {**ranges, "batch": ranges["rows"]}
    size_ranges = {
        alias: ranges[name]
        for name, aliases in DIMENSION_NAMES.items()
        if name in ranges
        for alias in aliases
    }
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: ProfileShapes = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        if (longest := ranges.get(VALUE_INPUTS.get(value.name, ""))) is not None:
            shapes[value.name] = (0,), (1,), (longest.max,)
            continue
        axes = value.type.tensor_type.shape.dim
        dimensions = [_dimension_range(d, value.name, size_ranges, graph) for d in axes]
        # also if a profile has a single size: the dimension is dynamic in the graph
        if any(not d.HasField("dim_value") for d in axes):
            shapes[value.name] = (
                tuple(d.min for d in dimensions),
                tuple(d.opt for d in dimensions),
                tuple(d.max for d in dimensions),
            )
    return shapes


def _dimension_range(dimension: Any, name: str, known: Mapping[str, SizeRange], graph: str) -> SizeRange:
    if dimension.HasField("dim_value"):
        return SizeRange(dimension.dim_value, dimension.dim_value, dimension.dim_value)
    if dimension.dim_param in known:
        return known[dimension.dim_param]
    dimension_name = dimension.dim_param or "without a name"
    raise RunError(
        f"{graph}: input '{name}' has a dynamic dimension ({dimension_name}) without a known length."
        f" Known dimensions: {', '.join(known)}.{did_you_mean(dimension_name, known)}",
        code="unknown-axis-size",
        file=graph,
    )


# Logged for every model, about a timing cache that only costs time, or followed by a more exact line.
_IGNORED_WARNINGS = ("has Int64 binding", "timing cache", "Detected layernorm nodes in FP16.")
_COMPATIBILITY_LEVELS: dict[HardwareCompatibility, str] = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "same-cc": "SAME_COMPUTE_CAPABILITY",
}
_WEIGHT_FLAGS: dict[WeightStorage, tuple[str, ...]] = {
    "embedded": (),
    "refittable": ("REFIT",),
    "stripped": ("STRIP_PLAN", "REFIT_IDENTICAL"),  # they are read back unchanged from the same graph
}


@dataclass(frozen=True)
class BuildOptions:
    """Options of the TensorRT builder; the stage's settings describe them."""

    workspace_mib: int | None
    optimization_level: int
    tf32: bool
    hardware_compatibility: HardwareCompatibility
    version_compatible: bool
    timing_cache: Path | None
    weights: WeightStorage = "embedded"
    weight_streaming: bool = False


class BuiltEngine(NamedTuple):
    """A serialized engine, TensorRT's warnings, and summaries of the parsed network and of the engine.

    kernels: what the engine inspector reports, None without a GPU.
    """

    plan: bytes
    warnings: list[Message]
    network: dict[str, Any]
    kernels: dict[str, Any] | None


def build_engine(
    trt: Any, path: Path, profiles: Sequence[ProfileShapes], options: BuildOptions, progress: Progress
) -> BuiltEngine:
    """Return the engine for the ONNX file `path`.

    profiles: the shapes of each optimization profile; empty for a graph without dynamic sizes.

    Raises:
        RunError: no builder can be created (no GPU), the parser rejects the file, or the build fails.
    """
    logger = make_logger(trt)
    builder = make_builder(trt, logger, path.name)
    network = builder.create_network(0)
    parse_onnx(trt, network, logger, path)
    _allow_decomposed_attention(trt, network)
    config = _configure(trt, builder, options, progress, path.name)
    for shapes in (shapes for shapes in profiles if shapes):
        profile = builder.create_optimization_profile()
        for name, (min_shape, opt_shape, max_shape) in shapes.items():
            set_range = profile.set_shape_input if name in VALUE_INPUTS else profile.set_shape
            set_range(name, min_shape, opt_shape, max_shape)
        config.add_optimization_profile(profile)
    cache = _attach_timing_cache(config, options.timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _rejected_error([explain_log(logger.errors, path.name)])
    if cache is not None and options.timing_cache is not None:
        _write_timing_cache(options.timing_cache, bytes(config.get_timing_cache().serialize()))
    warnings = [
        line for line in dict.fromkeys(logger.warnings) if not any(part in line for part in _IGNORED_WARNINGS)
    ]
    plan_bytes = bytes(plan)
    # an engine that was built ahead of time, without a GPU, cannot be opened
    kernels = None if current_gpu() is None else inspect_engine(trt, plan_bytes, make_logger(trt))
    messages = [explain_warning(line) for line in warnings]
    return BuiltEngine(plan_bytes, messages, summarize_network(network), kernels)


def make_builder(trt: Any, logger: Any, graph: str) -> Any:
    """Return a TensorRT builder.

    Raises:
        RunError: none can be created, because there is no GPU or its driver is too old.
    """
    try:
        return trt.Builder(logger)
    except Exception as error:  # pybind turns a null builder into different classes of errors
        raise _rejected_error([explain_log([*logger.errors, str(error)], graph)]) from error


def parse_onnx(trt: Any, network: Any, logger: Any, path: Path) -> None:
    """Parse the ONNX file `path` into `network`.

    Raises:
        RunError: TensorRT's parser rejects it; the message has one line per parser error.
    """
    parser = trt.OnnxParser(network, logger)
    # parse_from_file finds external weights next to the file
    if parser.parse_from_file(str(path)):
        return
    errors = [_read_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
    if not errors:
        raise _rejected_error([explain_log(logger.errors, path.name)])
    raise _rejected_error([*dict.fromkeys(explain_parser_error(error, path.name) for error in errors)])


def _allow_decomposed_attention(trt: Any, network: Any) -> None:
    """Let several kernels compute an attention where no fused one has its width and type, such as fp32."""
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer  # the bindings return an ILayer
            layer.attention.decomposable = True


def _rejected_error(problems: Sequence[Message]) -> RunError:
    """Return the error for TensorRT's messages about a graph; its code is theirs if all have the same."""
    codes = {problem.code for problem in problems}
    code = codes.pop() if len(codes) == 1 else "several-errors"
    return RunError("\n".join(map(str, problems)), code=code, file=problems[0].file, messages=problems)


def _read_parser_error(error: Any) -> ParserError:
    code = error.code()
    return ParserError(
        getattr(code, "name", str(code)),
        error.desc() or "",
        error.node_name() or "",
        error.node_operator() or "",
    )


def _configure(trt: Any, builder: Any, options: BuildOptions, progress: Progress, note: str) -> Any:
    config = builder.create_builder_config()
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    config.builder_optimization_level = options.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the engine inspector
    flag = config.set_flag if options.tf32 else config.clear_flag
    flag(trt.BuilderFlag.TF32)
    # weights of which two of every four are zero may use sparse kernels; others are not changed
    config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.hardware_compatibility != "none":
        level = _COMPATIBILITY_LEVELS[options.hardware_compatibility]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    for name in _WEIGHT_FLAGS[options.weights]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    config.progress_monitor = _progress_monitor(trt, progress, note)
    return config


def _progress_monitor(trt: Any, progress: Progress, note: str) -> Any:
    """Return a progress monitor that reports the outermost phase of the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)  # the bindings need this explicit call
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                progress(
                    min(step + 1, self.steps[phase_name]), self.steps[phase_name], f"{note}: {phase_name}"
                )
            return True  # False would cancel the build

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def timing_cache_path(trt: Any, machine: str) -> Path:
    """Return the path of the timing cache, one per TensorRT version and machine."""
    from smelt.core.files import json_hash

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / f"tensorrt-{trt.__name__}-{trt.__version__}-{json_hash(machine)[:12]}.cache"


def _attach_timing_cache(config: Any, path: Path | None) -> Any:
    if path is None:
        return None
    try:
        cached_bytes = path.read_bytes()
    except OSError:
        cached_bytes = b""
    cache = config.create_timing_cache(cached_bytes)
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        # the stored cache is of another device or version, or damaged
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _write_timing_cache(path: Path, data: bytes) -> None:
    """Store the timings; if the disk is full or read-only, only the next build takes longer."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
