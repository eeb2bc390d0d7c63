"""The onnx stage: export, check and simplify graphs for one target, and compare them with their parent."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.data import IMAGE_CLASSIFICATION, TASKS, Split, Task
from smelt.core.messages import Message, error_message
from smelt.core.stage import Context, Need, Settings
from smelt.export.onnx_export.check_export import (
    file_dtype,
    require_export_memory,
    require_runtime,
    required_opset,
    tolerance_kind,
)
from smelt.export.onnx_export.settings import OnnxSettings
from smelt.export.onnx_export.write_graphs import check_onnx_file, warn_about_tensorrt, write_graphs
from smelt.export.precision.kv_cache.kv_cache_support import unsupported_model, unsupported_task
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.families.registry import QUANTIZED_CONVOLUTIONS_KEY
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.images.image_batch import ImageBatch
from smelt.runtime.schemes.scheme import CONV_UNSUPPORTED_TARGETS

if TYPE_CHECKING:
    from smelt.runtime.batch import Batch


class Onnx:
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
    """

    name: ClassVar[str] = "onnx"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = (
        "torch.onnx.export(dynamo=True); ONNX Runtime docs/ContribOperators.md;"
        " github.com/daquexian/onnx-simplifier"
    )
    version: ClassVar[int] = 13
    settings_type: ClassVar[type[Settings]] = OnnxSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def check_rows(cls, settings: OnnxSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return the settings that do not fit the task, as messages."""
        measured = {"autotune": bool(settings.autotune), "threads": settings.threads == "autotune"}
        why = f"not supported for {IMAGE_CLASSIFICATION}, because it is measured on texts. Remove it."
        found = [
            error_message("unsupported-task", why, setting=name)
            for name, asked in measured.items()
            if asked and task == IMAGE_CLASSIFICATION
        ]
        lack = unsupported_task(task) if settings.kv_cache == "int8" else None
        if lack is not None:
            found.append(error_message("unsupported-task", lack, setting="kv_cache"))
        return found

    @classmethod
    def needs_with(cls, settings: OnnxSettings, given: Collection[str]) -> frozenset[Need]:
        """Return the data needed: samples where cache scales are calibrated."""
        if settings.kv_cache == "float":
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_model(
        cls, settings: OnnxSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        lack = unsupported_model(config) if settings.kv_cache == "int8" else None
        found = [] if lack is None else [error_message("does-not-fit-model", lack, setting="kv_cache")]
        if QUANTIZED_CONVOLUTIONS_KEY in config and (
            why := CONV_UNSUPPORTED_TARGETS.get(settings.graph_target)
        ):
            text = f"{why}. Branch before the quantize step with `from: NAME`."
            found.append(error_message("unsupported-target", text, setting="target"))
        return found, config

    def __call__(self, src: Artifact, settings: OnnxSettings, ctx: Context) -> None:
        """Export `src` into `ctx.out`."""
        from smelt.export.tokenizer.add_tokenizer import add_tokenizer
        from smelt.runtime.backends.open_runner import open_runner
        from smelt.runtime.models.checkpoint import copy_tokenizer

        require_runtime(settings, ctx)
        with open_runner(src, ctx.threads, "cpu") as parent:
            _export(parent, src.path, settings, ctx)
        copy_tokenizer(src.path, ctx.out)
        if ctx.task != IMAGE_CLASSIFICATION:
            add_tokenizer(src.path, ctx)


def _export(parent: Any, source: Path, settings: OnnxSettings, ctx: Context) -> None:
    """Write and compare the graphs of `parent`, the runner of the model in the folder `source`."""
    from smelt.export.autotune.run_autotune import choose_layer_operators, record_threads
    from smelt.export.generation_graph.add_generation_graphs import add_generation_graphs
    from smelt.export.graphs.causal_attention import unfused_heads_warning
    from smelt.export.graphs.export_graph import model_graphs
    from smelt.export.parity.check_parity import ExportedModel, check_exported_graphs
    from smelt.export.parity.torch_reference import run_reference
    from smelt.export.precision.half_graphs import convert_graphs_to_half, overflow_samples
    from smelt.export.precision.kv_cache.export_int8_cache import export_int8_cache, require_int8_caches
    from smelt.runtime.causal import is_causal
    from smelt.runtime.text.sentence_files import MODULES_FILE

    model = parent.backend.model
    listed = getattr(parent, "shortlist", None) is not None
    parent.shortlist = None  # the graphs of a step return all logits
    kind, filed = tolerance_kind(model, settings), file_dtype(settings)
    ctx.details.update(
        target=settings.target,
        dtype=settings.dtype,
        opset=required_opset(settings, model),
        **({"tf32": True} if settings.tf32 else {}),
    )
    reference = run_reference(parent, _parity_batch(parent, source, ctx))
    looked_at = overflow_samples(parent, source, ctx) if filed == "fp16" else []
    graphs = model_graphs(model, reference.batch.size if ctx.task == IMAGE_CLASSIFICATION else None)
    int8 = settings.kv_cache == "int8"
    if int8:
        require_int8_caches(graphs[0].module.attentions, parent.config, ctx)
    if settings.autotune:
        count = settings.threads if isinstance(settings.threads, int) else 1
        stay = [model.get_output_embeddings()] if listed else []  # its matrix rows are gathered
        reference = choose_layer_operators(
            parent, graphs, reference, settings.autotune_settings, count, stay, ctx
        )
    if is_causal(parent.config) and (
        told := unfused_heads_warning(graphs[0].module.attentions, settings.target)
    ):
        ctx.warnings.append(told)
    require_export_memory(model, settings)
    details, homes = write_graphs(graphs, settings, reference, ctx)
    kept = convert_graphs_to_half(graphs, homes, settings.target, filed, looked_at, ctx)
    warn_about_tensorrt(settings.graph_target, details, ctx)
    ctx.details["graphs"] = {
        n: {**check_onnx_file(ctx.out / f"{n}.onnx"), **told} for n, told in details.items()
    }
    ctx.progress(len(graphs), len(graphs) + 1, "parity")
    for name in ("config.json", "generation_config.json", MODULES_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, ctx.out / name)
    subject = ExportedModel(ctx.out, graphs, model, kind, settings.target, ctx.threads, settings.dtype, kept)
    ctx.details["parity"] = check_exported_graphs(subject, reference)
    finish = partial(export_int8_cache, subject, reference, source, ctx) if int8 else None
    if settings.generation_graph and settings.target == "ort-cpu" and reference.tokens is not None:
        add_generation_graphs(ctx, subject, reference.batch, source, finish)
    elif finish is not None:
        finish()
    if settings.target in PROVIDERS:
        from smelt.export.tensorrt.ort_provider_options import export_provider_options

        engine = settings.engine or ProviderSettings()
        ctx.details["profile"] = export_provider_options(settings.target, filed, engine, source, ctx)
    if settings.threads is not None:
        size = settings.autotune_settings.batch_size
        record_threads(settings.threads, settings.target, settings.dtype, reference, size, ctx)


def _parity_batch(parent: Any, folder: Path, ctx: Context) -> Batch | ImageBatch:
    """Return the samples of the parity check; warn if they are random."""
    from smelt.export.parity.parity_samples import parity_samples

    batch, real = parity_samples(parent, folder, ctx.data, ctx.task)
    if not real:
        what = "images" if ctx.task == IMAGE_CLASSIFICATION else "token ids"
        ctx.warn(
            "made-up-inputs",
            f"Parity was checked on random {what}, because the recipe has no train or validation data. Add"
            " data: {validation: FILE}.",
        )
    return batch
