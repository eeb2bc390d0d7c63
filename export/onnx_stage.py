"""The onnx stage: trace, simplify and check graphs for one target, and compare them with their parent.

Runtime, memory, quantization schemes and opset are checked before tracing. Placeholders are expanded after
the graph is simplified.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError, RunError
from smelt.core.files import read_json_object, write_json
from smelt.core.messages import Message, error_message
from smelt.core.system import require_memory
from smelt.data.splits import Split
from smelt.data.tasks import Modality, Task, task_traits
from smelt.export.batch_dependence import DEPENDS_ON_BATCH, graphs_depend_on_batch
from smelt.export.graph_files import read_graph, set_input_defaults, write_graph
from smelt.export.scheme_support import file_dtype, tolerance_kind
from smelt.export.settings import (
    OnnxSettings,
    ProviderSettings,
    unsupported_attention,
    unsupported_cuda_graph,
    unsupported_model,
    unsupported_sizes,
    unsupported_task,
    windows_beyond_shape,
)
from smelt.generation.backend import FeedBatch
from smelt.models.families.registry import QUANTIZED_CONVOLUTIONS_KEY
from smelt.models.model_size import SizeInputs, StepSize, certain_bytes
from smelt.models.text_rules import lower_position_limit, max_input_length, position_limit
from smelt.quantization.scheme import CONV_UNSUPPORTED_TARGETS, FUSED_OPSET
from smelt.quantization.schemes.registry import (
    SCHEMES,
)
from smelt.runtimes.fixed_caches import CACHE_OPSET, require_cache_operators
from smelt.runtimes.fixed_shapes import FixedShape, FixedShapeBackend
from smelt.stage import Context, Need, Settings, Stage

if TYPE_CHECKING:
    from smelt.export.graphs.attention import GraphSpec
    from smelt.export.parity.check_parity import ExportedModel
    from smelt.export.parity.references import TorchReference
    from smelt.generation.backend import Batch, Tokens


def require_runtime(settings: OnnxSettings, ctx: Context) -> None:
    """Require OpenVINO if it is the target, and operators of caches; warn of no bf16 on this processor.

    Raises:
        MissingDependencyError: it is not installed, or ONNX Runtime is too old.
    """
    if settings.cache_length is not None:
        require_cache_operators()
    if settings.target != "openvino":
        return
    from smelt.runtimes.openvino_backend import has_bf16, import_openvino

    import_openvino()
    if settings.dtype == "bf16" and not has_bf16():
        ctx.warn(
            "no-bf16",
            "This processor has no bf16, so OpenVINO used another precision. Parity, scores and latency may"
            " differ on a processor with bf16.",
        )


_LESS_MEMORY = "Quantize the model first (quantize: {scheme: int4}), or use a machine with more memory."


def require_export_memory(model: Any, settings: OnnxSettings) -> None:
    """Require enough memory for the copies of the weights that an export makes.

    Raises:
        RunError: there is not enough memory.
    """
    weights = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    # the exported graph holds them once more; converting and simplifying hold two graphs at a time
    copies = 2 if settings.simplify or file_dtype(settings) != "fp32" else 1
    require_memory(
        copies * sum(weights.values()),
        "onnx: exporting",
        f"Set simplify: false. {_LESS_MEMORY}",
    )


BF16_OPSET = 22
# Older ones are for older runtimes, so such a setting is never raised
FIRST_COMPLETE_OPSET = 19
GENERATION_GRAPH_OPSET = 18  # axes of its reductions are computed
# The values of settings that inputs other than texts or images support.
_EXPORTED_FORMS: dict[Modality, dict[str, tuple[str, ...]]] = {
    "arrays": {"target": ("ort-cpu",)},
    "audio": {"target": ("ort-cpu",), "dtype": ("fp32",)},
    "image-and-text": {"target": ("ort-cpu", "openvino"), "dtype": ("fp32",)},
}
_CACHED_BYTES = 2**30  # of dequantized weights, which the parity checks use a few times


def export_size(settings: OnnxSettings, inputs: SizeInputs) -> StepSize:
    """Return the estimated sizes of an export: the model, and its weights once more in the graph."""
    size = inputs.source
    each = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}[file_dtype(settings)]
    stored = size.stored_as(
        min(size.bytes_per_weight, each) if size.bytes_per_weight < 2 else each,
        min(size.table_bytes_per_weight, each) if size.table_bytes_per_weight < 2 else each,
    )
    # quantized weights stay as they are
    held = stored.stored_bytes if size.bytes_per_weight < 2 else size.float_bytes
    return StepSize(
        memory_bytes=held + stored.stored_bytes,
        least_bytes=min(certain_bytes(size), held),
        result=stored,
        disk_bytes=stored.stored_bytes,
        temporary_bytes=stored.stored_bytes,
        work=float(size.parameters),
    )


def required_opset(settings: OnnxSettings, model: Any) -> int:
    """Return the opset of the settings, or a newer one if quantized operators or bf16 need it.

    Graphs for CUDA have ONNX's fused operators, unless the opset is one for older runtimes, or a layer would
    be computed on the CPU in theirs. Conv, Sin and Cos support bfloat16 from opset 22 on
    (https://onnx.ai/onnx/operators/onnx__Conv.html).

    Raises:
        InputError: `opset-too-low`, the setting is for an older runtime, which would not open a newer graph.
    """
    from smelt.export.cuda_kernels import has_older_kernels
    from smelt.quantization.layers import layer_scheme

    used_schemes = {layer_scheme(module) for module in model.modules()}
    names = [name for name in SCHEMES if name in used_schemes]
    of_dtype = BF16_OPSET if file_dtype(settings) == "bf16" else 0
    is_fused = settings.graph_target == "ort-cuda" and settings.opset >= FIRST_COMPLETE_OPSET
    of_target = FUSED_OPSET if is_fused and not has_older_kernels(model) else 0
    of_caches = CACHE_OPSET if settings.cache_length is not None else 0
    required = max(
        [
            of_dtype,
            of_target,
            of_caches,
            *(SCHEMES[n].min_opset.get(settings.graph_target, 0) for n in names),
        ],
        default=0,
    )
    if settings.opset < FIRST_COMPLETE_OPSET < required:
        parts = f"dtype {settings.dtype}" if required == of_dtype else f"scheme {' and '.join(names)}"
        parts = "cache_length" if required == of_caches else parts
        raise InputError(
            f"onnx: opset {settings.opset} has no operators for {parts}, which needs {required}. Set opset:"
            f" {required}, or branch before the quantize step with `from: NAME`.",
            code="opset-too-low",
            setting="opset",
        )
    return max(settings.opset, required)


def write_graphs(
    graphs: list[GraphSpec], settings: OnnxSettings, reference: TorchReference, ctx: Context
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Write all graphs; return by graph the details for the report, and the modules of its nodes."""
    batch = reference.batch
    tokens = batch.feeds.get("input_ids") if isinstance(batch, FeedBatch) else batch.input_ids
    if tokens is not None:
        tokens = tokens.flatten() if isinstance(batch, FeedBatch) else tokens[batch.attention_mask == 1]
    details: dict[str, dict[str, Any]] = {}
    modules_by_graph: dict[str, dict[str, str]] = {}
    for graph_index, graph in enumerate(graphs):
        ctx.progress(graph_index, len(graphs) + 1, graph.name)
        graph_tokens = tokens if "input_ids" in graph.input_names else None
        details[graph.name] = _write_graph(graph, settings, graph_tokens, ctx, modules_by_graph)
    return details, modules_by_graph


def _write_graph(
    graph: GraphSpec,
    settings: OnnxSettings,
    tokens: Tokens | None,
    ctx: Context,
    homes: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Export one graph in float32 and simplify it; return the details for the report.

    Args:
        graph: the graph to export.
        settings: of the stage.
        tokens: int64 [n], real tokens to compare the simplified graph on; None for a graph of images.
        ctx: its `out` is the folder of the graph.
        homes: filled with the modules of each graph's nodes if the files will have another precision.
    """
    from smelt.export.fuse_biases import fuse_biases_in_file
    from smelt.export.graphs.export_graph import export_graph
    from smelt.export.lower_opset import LAYER_NORM_OPSET
    from smelt.export.remove_padding import remove_padding_in_file
    from smelt.export.simplify_graph import expand_placeholders_in_file, simplify_file

    start = time.perf_counter()
    path = ctx.out / f"{graph.name}.onnx"
    model = export_graph(graph, settings.graph_target, ctx.details["opset"])
    exported = time.perf_counter()
    if file_dtype(settings) != "fp32":
        from smelt.export.half_graphs import module_of_nodes

        homes[graph.name] = module_of_nodes(model, graph.module)
    write_graph(model, path)
    del model  # simplifying holds two graphs
    if settings.simplify and (reason := simplify_file(path, tokens)) is not None:
        ctx.warnings.append(reason.with_prefix(f"{graph.name}: not simplified: "))
    expand_placeholders_in_file(path)
    if settings.target == "ort-cpu":
        fuse_biases_in_file(path)
        # the number of real tokens is a dynamic size; norms are found by their operator
        if settings.sequence_length is None and ctx.details["opset"] >= LAYER_NORM_OPSET:
            remove_padding_in_file(path, split_attention=file_dtype(settings) == "fp32")
    if graph.input_defaults and settings.graph_target not in (
        "tensorrt",
        "openvino",
    ):  # it treats a default as a constant
        set_input_defaults(path, graph.input_defaults)
    return {"export_seconds": round(exported - start, 3), "seconds": round(time.perf_counter() - start, 3)}


def warn_about_tensorrt(target: str, graphs: Iterable[str], ctx: Context) -> None:
    """Warn about what TensorRT rejects now, because the engine may be built much later and elsewhere."""
    if target != "tensorrt":
        return
    from smelt.export.tensorrt.preflight import load_graph, preflight

    paths = [ctx.out / f"{name}.onnx" for name in graphs]
    for path in paths:
        for problem in preflight(load_graph(path), path):
            message = problem.as_message()
            ctx.warn(message.code, message.message, file=message.file)


def check_onnx_file(path: Path) -> dict[str, Any]:
    """Check the finished graph with ONNX; return the number of its nodes, and the number by operator.

    Raises:
        RunError: it is not valid.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise RunError(
            f"{path.name}: the exported graph is not valid ONNX: {error}", code="invalid-graph"
        ) from error
    nodes = read_graph(path, values=False).graph.node
    return {"nodes": len(nodes), "operators": dict(Counter(n.op_type for n in nodes).most_common())}


class Onnx(Stage[OnnxSettings]):
    """Export to ONNX graphs for one runtime, and check that they compute the same.

    A translation model becomes `encoder_model.onnx`, which also computes the
    keys and values of cross-attention, and `decoder_with_past_model.onnx`, which
    decodes one token per call. Classifiers, language models and sentence
    embedders become `model.onnx`; an embedder's output is the pooled vector,
    `sentence_embedding`. An image classifier takes `pixel_values` of one size.
    For ort-cpu, models that generate are also exported as `generate.onnx` and
    `generate_beams.onnx`, which contain the whole generation loop. Batch and
    lengths are dynamic. Each output is compared with the parent's on real inputs;
    a difference above the tolerance is an error.

        - onnx: {target: ort-cpu}
        - onnx: {target: tensorrt, dtype: fp16}
        - onnx: {target: openvino, dtype: bf16}
        - onnx: {target: ort-tensorrt, dtype: fp16, engine: {max_batch_size: 16}}
        - onnx: {target: ort-cpu, autotune: true, threads: autotune}
        - onnx: {target: ort-cpu, kv_cache: int8}
        - onnx: {target: openvino, attention: int8}
    """

    name: ClassVar[str] = "onnx"
    produces: ClassVar[Format] = "onnx"
    source: ClassVar[str] = (
        "torch.onnx.export(dynamo=True); ONNX Runtime docs/ContribOperators.md;"
        " github.com/daquexian/onnx-simplifier"
    )
    version: ClassVar[int] = 22
    settings_type: ClassVar[type[Settings]] = OnnxSettings

    @classmethod
    def check_rows(cls, settings: OnnxSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return the settings that do not fit the task, as messages."""
        measured = {"autotune": bool(settings.autotune), "threads": settings.threads == "autotune"}
        reason = f"not supported for {task}, because it is measured on texts. Remove it."
        errors = [
            error_message("unsupported-task", reason, setting=name)
            for name, is_set in measured.items()
            if is_set and task_traits(task).modality != "text"
        ]
        errors += [
            error_message("unsupported-task", reason, setting=name)
            for name, reason in unsupported_sizes(settings, task).items()
        ]
        errors += [
            error_message("window-too-long", reason, setting=name)
            for name, reason in windows_beyond_shape(settings, data).items()
        ]
        if (reason_of_capture := unsupported_cuda_graph(settings, task)) is not None:
            errors.append(error_message("no-fixed-shapes", reason_of_capture, setting="cuda_graph"))
        for name, supported in _EXPORTED_FORMS.get(task_traits(task).modality, {}).items():
            if (value := getattr(settings, name)) not in supported:
                text = f"{value}: a model for {task} is exported for {' or '.join(supported)} only."
                errors.append(error_message("unsupported-task", text, setting=name))
        if settings.makes_generation_graphs(task) and settings.opset < GENERATION_GRAPH_OPSET:
            text = (
                f"{settings.opset}: generate.onnx needs {GENERATION_GRAPH_OPSET} or more. Set a larger"
                " opset, or generation_graph: false."
            )
            errors.append(error_message("opset-too-low", text, setting="opset"))
        unsupported = unsupported_task(task) if settings.kv_cache == "int8" else None
        if unsupported is not None:
            errors.append(error_message("unsupported-task", unsupported, setting="kv_cache"))
        if settings.attention == "int8" and (unsupported := unsupported_attention(task)) is not None:
            errors.append(error_message("unsupported-task", unsupported, setting="attention"))
        return errors

    @classmethod
    def needs_with(cls, settings: OnnxSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data needed: samples where scales of caches or attention are calibrated."""
        if settings.kv_cache == settings.attention == "float":
            return frozenset()
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def check_model(
        cls, settings: OnnxSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        unsupported = unsupported_model(config) if settings.kv_cache == "int8" else None
        errors = (
            []
            if unsupported is None
            else [error_message("does-not-fit-model", unsupported, setting="kv_cache")]
        )
        limit = position_limit(config)
        for name in ("sequence_length", "cache_length"):
            if limit is not None and (getattr(settings, name) or 0) > limit:
                text = f"{getattr(settings, name)} is more than the model's {limit} positions. Lower it."
                errors.append(error_message("does-not-fit-model", text, setting=name))
        if QUANTIZED_CONVOLUTIONS_KEY in config and (
            reason := CONV_UNSUPPORTED_TARGETS.get(settings.graph_target)
        ):
            text = f"{reason}. Branch before the quantize step with `from: NAME`."
            errors.append(error_message("unsupported-target", text, setting="target"))
        return errors, config

    @classmethod
    def estimate_size(cls, settings: OnnxSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        return export_size(settings, inputs)

    def __call__(self, src: Artifact, settings: OnnxSettings, ctx: Context) -> None:
        """Export `src` into `ctx.out`."""
        from smelt.export.tokenizer import add_tokenizer
        from smelt.models.checkpoint import copy_tokenizer, widened_bytes
        from smelt.quantization.layers import limit_weight_cache
        from smelt.runtimes.registry import open_runner

        require_runtime(settings, ctx)
        require_room_for_text(settings.sequence_length, src.path)
        require_room_for_windows(settings, src.path, ctx.data)
        require_memory(widened_bytes(src.path), "onnx: loading the model in float32", _LESS_MEMORY)
        with open_runner(src, ctx.threads, "cpu") as parent:
            backend: Any = parent.backend
            limit_weight_cache(backend.model, _CACHED_BYTES)
            _export(parent, src.path, settings, ctx)
        ctx.details[DEPENDS_ON_BATCH] = settings.batch_size != 1 and graphs_depend_on_batch(
            sorted(ctx.out.glob("*.onnx"))
        )
        copy_tokenizer(src.path, ctx.out)
        if ctx.traits.has_tokenizer:
            add_tokenizer(src.path, ctx)


def _export(parent: Any, source: Path, settings: OnnxSettings, ctx: Context) -> None:
    """Write and compare the graphs of `parent`, the runner of the model in the folder `source`."""
    from smelt.export.autotune import choose_layer_operators, record_threads
    from smelt.export.graphs.decoder_only import unfused_heads_warning
    from smelt.export.graphs.export_graph import model_graphs
    from smelt.export.graphs.fix_shape import fix_shapes
    from smelt.export.half_graphs import convert_graphs_to_half, overflow_samples
    from smelt.export.int8_attention import export_int8_attention
    from smelt.export.kv_cache import require_int8_caches
    from smelt.export.parity.check_parity import ExportedModel, check_exported_graphs
    from smelt.export.parity.references import run_reference
    from smelt.generation.generating_runners import is_causal

    model = parent.backend.model
    has_shortlist = getattr(parent, "shortlist", None) is not None
    parent.shortlist = None  # the graphs of a step return all logits
    kind, graph_dtype = tolerance_kind(model, settings), file_dtype(settings)
    ctx.details.update(
        target=settings.target,
        dtype=settings.dtype,
        opset=required_opset(settings, model),
        **settings.fixed_sizes,
        **{name: True for name in ("tf32", "cuda_graph") if getattr(settings, name)},
        **({"cache_length": settings.cache_length} if settings.cache_length else {}),
    )
    shape = _fix_parent_shape(parent, settings)
    reference = run_reference(parent, _parity_batch(parent, source, ctx))
    overflow_batches = overflow_samples(parent, source, ctx) if graph_dtype == "fp16" else []
    graphs = fix_shapes(
        model_graphs(
            model,
            reference.batch.size if ctx.traits.reads_images else None,
            settings.cache_length,
        ),
        shape,
    )
    if settings.kv_cache == "int8":
        require_int8_caches(graphs[0].module.attentions, parent.config, ctx)
    if settings.autotune:
        count = settings.threads if isinstance(settings.threads, int) else 1
        float_modules = (
            [model.get_output_embeddings()] if has_shortlist else []
        )  # its matrix rows are gathered
        reference = choose_layer_operators(
            parent, graphs, reference, settings.autotune_settings, count, float_modules, ctx
        )
    if is_causal(parent.config) and (
        warning := unfused_heads_warning(graphs[0].module.attentions, settings.target)
    ):
        ctx.warnings.append(warning)
    require_export_memory(model, settings)
    details, node_modules = write_graphs(graphs, settings, reference, ctx)
    fp32_modules = (
        convert_graphs_to_half(graphs, node_modules, settings.target, graph_dtype, overflow_batches, ctx)
        if node_modules
        else {}
    )
    warn_about_tensorrt(settings.graph_target, details, ctx)
    ctx.details["graphs"] = {
        n: {**check_onnx_file(ctx.out / f"{n}.onnx"), **values} for n, values in details.items()
    }
    ctx.progress(len(graphs), len(graphs) + 1, "parity")
    _copy_configs(source, ctx.out, model)
    exported_model = ExportedModel(
        ctx.out, graphs, model, kind, settings.target, ctx.threads, settings.dtype, fp32_modules
    )
    ctx.details["parity"] = check_exported_graphs(exported_model, reference)
    _add_generation_graphs(exported_model, reference, source, settings, ctx)
    if settings.attention == "int8":
        export_int8_attention(exported_model, reference, parent, source, ctx)
    if settings.target == "ort-tensorrt":
        from smelt.export.tensorrt.stage import export_provider_options

        engine = settings.engine or ProviderSettings()
        ctx.details["profile"] = export_provider_options(graph_dtype, engine, source, ctx)
    if settings.threads is not None:
        size = (settings.autotune_settings.batch_sizes or (1,))[0]
        record_threads(settings.threads, settings.target, settings.dtype, reference, size, ctx)


def _add_generation_graphs(
    exported: ExportedModel, reference: TorchReference, source: Path, settings: OnnxSettings, ctx: Context
) -> None:
    """Add the graphs of the whole generation, and int8 caches, where the settings ask for them."""
    from smelt.export.generation_graph.write import add_generation_graphs
    from smelt.export.kv_cache import export_int8_cache

    is_int8 = settings.kv_cache == "int8"
    export_caches = partial(export_int8_cache, exported, reference, source, ctx) if is_int8 else None
    if settings.generation_graph and settings.target == "ort-cpu" and reference.tokens is not None:
        add_generation_graphs(ctx, exported, reference.batch, source, export_caches)
    elif export_caches is not None:
        export_caches()


def _copy_configs(source: Path, folder: Path, model: Any) -> None:
    from smelt.export.parity.references import RUNNER_FILES
    from smelt.models.image_text_model import graph_settings

    for name in RUNNER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if settings := graph_settings(model):
        write_json(folder / "config.json", read_json_object(folder / "config.json") | settings)


def require_room_for_text(length: int | None, folder: Path) -> None:
    """Require that a fixed length has room for a token of a text next to the special ones of its tokenizer.

    Raises:
        InputError: it has none.
    """
    from smelt.models.checkpoint import load_tokenizer

    if length is None:
        return
    special = load_tokenizer(folder).num_special_tokens_to_add()
    if length <= special:
        raise InputError(
            f"onnx: sequence_length {length} has no room for text next to {special} special tokens. Set"
            f" sequence_length: {special + 1} or more.",
            code="does-not-fit-model",
            setting="sequence_length",
        )


def require_room_for_windows(settings: OnnxSettings, folder: Path, data: Mapping[str, Split]) -> None:
    """Require that windows of running text fit into inputs and caches of a fixed length.

    Raises:
        InputError: `window-too-long`.
    """
    if not any(split.windows for split in data.values()):
        return
    from smelt.models.checkpoint import load_tokenizer

    limit = max_input_length(load_tokenizer(folder), read_json_object(folder / "config.json"))
    for name, reason in windows_beyond_shape(settings, data, limit).items():
        raise InputError(f"onnx: {name} {reason}", code="window-too-long", setting=name)


def _fix_parent_shape(parent: Any, settings: OnnxSettings) -> FixedShape:
    """Return the fixed sizes of the graphs; the runner `parent` is padded to them too.

    Where a quantized layer computes ranges over a batch, padding is part of the reference. Texts have room in
    caches of a fixed length.
    """
    if settings.cache_length is not None:
        lower_position_limit(parent.config, settings.cache_length)
    shape = FixedShape(settings.batch_size, settings.sequence_length)
    if shape:
        parent.backend = FixedShapeBackend(parent.backend, shape, parent.config.get("pad_token_id") or 0)
    return shape


def _parity_batch(parent: Any, folder: Path, ctx: Context) -> Batch | FeedBatch:
    """Return the samples of the parity check; warn if they are random."""
    from smelt.export.parity.parity_samples import parity_samples

    batch, is_real = parity_samples(parent, folder, ctx.data, ctx.task)
    if not is_real:
        input_kind = {"text": "token ids", "image": "images", "audio": "audio"}.get(
            ctx.traits.modality, "arrays"
        )
        ctx.warn(
            "made-up-inputs",
            f"Parity was checked on random {input_kind}, because the recipe has no train or "
            "validation data. Add"
            " data: {validation: FILE}.",
        )
    return batch
