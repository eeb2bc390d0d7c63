"""The onnx stage: graphs for one target, checked, simplified, compared with their parent."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.data import IMAGES, TASKS, Split, Task
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need, Settings
from smelt.export.precision.caches.fit import refused_model, refused_task
from smelt.export.stage.fit import kind_of, opset_of, precision_in_file, require_room, require_runtime
from smelt.export.stage.settings import OnnxSettings
from smelt.export.stage.write import checked, tell_of_tensorrt, write_all
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.families.registry import CODED_CONVOLUTIONS
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.images.batch import ImageBatch
from smelt.runtime.schemes.scheme import REFUSED_CONVOLUTIONS

if TYPE_CHECKING:
    from smelt.runtime.batch import Batch


class Onnx:
    """Export to ONNX graphs that one runtime executes fast, and prove that they compute the same.

    A translator leaves as `encoder_model.onnx`, which also computes the keys and values of
    cross-attention, and `decoder_with_past_model.onnx`, one token at a time; a classifier, a sentence
    embedder (whose output is the pooled vector, `sentence_embedding`) or a language model as `model.onnx`;
    so does a classifier of images, for `pixel_values` of one size.
    For ort-cpu a model that generates leaves as `generate.onnx` and `generate_beams.onnx` too, which go from
    texts to texts in one call. Batch and lengths are dynamic. Each output is compared with the parent's on
    real inputs; a difference above the tolerance is an error.

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
        """Return what of the settings does not fit the task, by setting."""
        measured = {"autotune": bool(settings.autotune), "threads": settings.threads == "autotune"}
        why = f"what is chosen by measuring is of texts; leave it out for {IMAGES}."
        found = [
            mistake("unsupported-task", why, setting=name)
            for name, asked in measured.items()
            if asked and task == IMAGES
        ]
        lack = refused_task(task) if settings.kv_cache == "int8" else None
        if lack is not None:
            found.append(mistake("unsupported-task", lack, setting="kv_cache"))
        return found

    @classmethod
    def needs_with(cls, settings: OnnxSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: rows where scales are found, those for calibration if there are any."""
        if settings.kv_cache == "float":
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_model(
        cls, settings: OnnxSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        lack = refused_model(config) if settings.kv_cache == "int8" else None
        found = [] if lack is None else [mistake("does-not-fit-model", lack, setting="kv_cache")]
        if CODED_CONVOLUTIONS in config and (why := REFUSED_CONVOLUTIONS.get(settings.graphs_of)):
            text = f"{why}. Branch off before the quantize step with `from: NAME`."
            found.append(mistake("unsupported-target", text, setting="target"))
        return found, config

    def __call__(self, src: Artifact, settings: OnnxSettings, ctx: Context) -> None:
        """Export `src` into `ctx.out`."""
        from smelt.export.tokenizer.in_stage import add_tokenizer
        from smelt.runtime.backends.open_runner import open_runner
        from smelt.runtime.models.checkpoint import copy_tokenizer

        require_runtime(settings, ctx)
        with open_runner(src, ctx.threads, "cpu") as parent:
            _export(parent, src.path, settings, ctx)
        copy_tokenizer(src.path, ctx.out)
        if ctx.task != IMAGES:
            add_tokenizer(src.path, ctx)


def _export(parent: Any, source: Path, settings: OnnxSettings, ctx: Context) -> None:
    """Write and compare the graphs of `parent`, the runner of the model in the folder `source`."""
    from smelt.export.graphs.causal_attention import unfused
    from smelt.export.graphs.of_model import graphs_of
    from smelt.export.loop.in_stage import add_loops
    from smelt.export.parity.check import Subject, check_graphs
    from smelt.export.parity.reference import reference_of
    from smelt.export.precision.caches.in_stage import keep_as_int8, require_int8_caches
    from smelt.export.precision.choose import narrow_graphs, rows_looked_at
    from smelt.export.tune.in_stage import choose_operators, write_threads
    from smelt.runtime.causal import is_causal
    from smelt.runtime.text.sentence_files import MODULES

    model = parent.backend.model
    listed = getattr(parent, "shortlist", None) is not None
    parent.shortlist = None  # the graphs of a step give all logits
    kind, filed = kind_of(model, settings), precision_in_file(settings)
    ctx.details.update(
        target=settings.target,
        dtype=settings.dtype,
        opset=opset_of(settings, model),
        **({"tf32": True} if settings.tf32 else {}),
    )
    reference = reference_of(parent, _batch(parent, source, ctx))
    looked_at = rows_looked_at(parent, source, ctx) if filed == "fp16" else []
    graphs = graphs_of(model, reference.batch.size if ctx.task == IMAGES else None)
    int8 = settings.kv_cache == "int8"
    if int8:
        require_int8_caches(graphs[0].module.attentions, parent.config, ctx)
    if settings.autotune:
        count = settings.threads if isinstance(settings.threads, int) else 1
        stay = [model.get_output_embeddings()] if listed else []  # its rows are gathered: see add_loops
        reference = choose_operators(parent, graphs, reference, settings.tuned_for, count, stay, ctx)
    if is_causal(parent.config) and (told := unfused(graphs[0].module.attentions, settings.target)):
        ctx.warnings.append(told)
    require_room(model, settings)
    details, homes = write_all(graphs, settings, reference, ctx)
    kept = narrow_graphs(graphs, homes, settings.target, filed, looked_at, ctx)
    tell_of_tensorrt(settings.graphs_of, details, ctx)
    ctx.details["graphs"] = {n: {**checked(ctx.out / f"{n}.onnx"), **told} for n, told in details.items()}
    ctx.progress(len(graphs), len(graphs) + 1, "parity")
    for name in ("config.json", "generation_config.json", MODULES):
        if (source / name).is_file():
            shutil.copyfile(source / name, ctx.out / name)
    subject = Subject(ctx.out, graphs, model, kind, settings.target, ctx.threads, settings.dtype, kept)
    ctx.details["parity"] = check_graphs(subject, reference)
    finish = partial(keep_as_int8, subject, reference, source, ctx) if int8 else None
    if settings.generation_graph and settings.target == "ort-cpu" and reference.tokens is not None:
        add_loops(ctx, subject, reference.batch, source, finish)
    elif finish is not None:
        finish()
    if settings.target in PROVIDERS:
        from smelt.export.tensorrt.provider_options import write_provider

        engine = settings.engine or ProviderSettings()
        ctx.details["profile"] = write_provider(settings.target, filed, engine, source, ctx)
    if settings.threads is not None:
        size = settings.tuned_for.batch_size
        write_threads(settings.threads, settings.target, settings.dtype, reference, size, ctx)


def _batch(parent: Any, folder: Path, ctx: Context) -> Batch | ImageBatch:
    """Return the rows that parity is asked on; a warning says if they are made up."""
    from smelt.export.parity.rows import rows_for

    batch, real = rows_for(parent, folder, ctx.data, ctx.task)
    if not real:
        what = "images" if ctx.task == IMAGES else "token ids"
        ctx.warn(
            "made-up-inputs", f"Parity was checked on random {what}: there is no train or validation data."
        )
    return batch
