"""The onnx stage: graphs for one target, checked, simplified, compared with their parent."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.artifact import Artifact, Format
from smelt.core.data import IMAGES, TASKS, Split, Task
from smelt.core.errors import InputError, RunError
from smelt.core.memory import require_memory
from smelt.core.stage import Context, Need, Settings
from smelt.export.precision.caches.fit import refused_model, refused_task
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.export.tune.settings import Tune
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.images.batch import ImageBatch
from smelt.runtime.schemes.scheme import graphs_for

if TYPE_CHECKING:
    from smelt.export.graphs.graph import Graph
    from smelt.export.parity.reference import Reference
    from smelt.runtime.batch import Batch, Tokens
    from smelt.runtime.layers.emit import Target
    from smelt.runtime.schemes.scheme import Scheme


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

    # A setting that came later: as it is by default, it is not written down, and changes no key.
    unsaid: ClassVar[frozenset[str]] = frozenset({"kv_cache"})

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
            raise ValueError("dtype fp16 is for GPUs; on the CPU ONNX Runtime converts back at every step")
        if self.target == "openvino" and self.dtype == "fp16":
            raise ValueError("dtype fp16 is for GPUs; with target openvino give fp32 or bf16")
        if self.target == "ort-cpu" and self.dtype == "bf16":
            raise ValueError(
                "dtype bf16 is for GPUs and OpenVINO: on the CPU ONNX Runtime has no products in it; give"
                " target: openvino, or dtype: fp32"
            )
        if self.tune and self.target != "ort-cpu":
            raise ValueError(
                "tune chooses between operators of ONNX Runtime on the CPU; set target: ort-cpu, or remove it"
            )
        if self.threads is not None and self.target not in ("ort-cpu", "openvino"):
            raise ValueError(
                f"threads is for graphs that run on the CPU; target {self.target} is for GPUs: remove it"
            )
        if self.kv_cache == "int8" and self.target != "ort-cpu":
            raise ValueError(
                "kv_cache: int8 is an input of ONNX Runtime's attention on the CPU, and target is"
                f" {self.target}: set kv_cache: float, or target: ort-cpu"
            )
        if self.engine is not None and self.target not in PROVIDERS:
            raise ValueError(
                f"engine is for target ort-tensorrt and ort-tensorrt-rtx, and target is {self.target}: remove"
                " it, or put it into a `tensorrt` step"
            )
        if self.target == "ort-tensorrt-rtx" and self.engine and (said := self.engine.unknown_to_rtx()):
            raise ValueError(f"TensorRT for RTX has no option for engine: {{{', '.join(said)}}}: remove it")
        return self


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
        - onnx: {target: ort-cpu, tune: true, threads: tune}
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
    version: ClassVar[int] = 11
    settings_type: ClassVar[type[Settings]] = OnnxSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def check_rows(
        cls, settings: OnnxSettings, task: Task, data: Mapping[str, Split]
    ) -> list[tuple[str, str]]:
        """Return what of the settings does not fit the task, by setting."""
        measured = {"tune": bool(settings.tune), "threads": settings.threads == "tune"}
        why = f"what is chosen by measuring is of texts; leave it out for {IMAGES}."
        found = [(name, why) for name, asked in measured.items() if asked and task == IMAGES]
        lack = refused_task(task) if settings.kv_cache == "int8" else None
        return found if lack is None else [*found, ("kv_cache", lack)]

    @classmethod
    def needs_with(cls, settings: OnnxSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: rows where scales are found, those for calibration if there are any."""
        if settings.kv_cache == "float":
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_model(
        cls, settings: OnnxSettings, config: Mapping[str, Any]
    ) -> tuple[list[tuple[str, str]], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        lack = refused_model(config) if settings.kv_cache == "int8" else None
        return [] if lack is None else [("kv_cache", lack)], config

    def __call__(self, src: Artifact, settings: OnnxSettings, ctx: Context) -> None:
        """Export `src` into `ctx.out`."""
        from smelt.export.tokenizer.in_stage import add_tokenizer
        from smelt.runtime.backends.open_runner import open_runner
        from smelt.runtime.models.checkpoint import copy_tokenizer

        _require_runtime(settings, ctx)
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
    kind, filed = _kind(model, settings), _in_file(settings)
    ctx.facts.update(target=settings.target, dtype=settings.dtype, opset=_opset(settings, model))
    reference = reference_of(parent, _batch(parent, source, ctx))
    looked_at = rows_looked_at(parent, source, ctx) if filed == "fp16" else []
    graphs = graphs_of(model, reference.batch.size if ctx.task == IMAGES else None)
    int8 = settings.kv_cache == "int8"
    if int8:
        require_int8_caches(graphs[0].module.attentions, parent.config, ctx)
    if settings.tune:
        count = settings.threads if isinstance(settings.threads, int) else 1
        stay = [model.get_output_embeddings()] if listed else []  # its rows are gathered: see add_loops
        reference = choose_operators(parent, graphs, reference, settings.tuned_for, count, stay, ctx)
    if is_causal(parent.config) and (told := unfused(graphs[0].module.attentions, settings.target)):
        ctx.warnings.append(told)
    _require_memory(model, settings)
    facts, homes = _write_all(graphs, settings, reference, ctx)
    kept = narrow_graphs(graphs, homes, settings.target, filed, looked_at, ctx)
    _tell_of_tensorrt(settings.graphs_of, facts, ctx)
    ctx.facts["graphs"] = {n: {**_checked(ctx.out / f"{n}.onnx"), **told} for n, told in facts.items()}
    ctx.progress(len(graphs), len(graphs) + 1, "parity")
    for name in ("config.json", "generation_config.json", MODULES):
        if (source / name).is_file():
            shutil.copyfile(source / name, ctx.out / name)
    subject = Subject(ctx.out, graphs, model, kind, settings.target, ctx.threads, settings.dtype, kept)
    ctx.facts["parity"] = check_graphs(subject, reference)
    finish = partial(keep_as_int8, subject, reference, source, ctx) if int8 else None
    if settings.loop and settings.target == "ort-cpu" and reference.tokens is not None:
        add_loops(ctx, subject, reference.batch, source, finish)
    elif finish is not None:
        finish()
    if settings.target in PROVIDERS:
        from smelt.export.tensorrt.provider_options import write_provider

        engine = settings.engine or ProviderSettings()
        ctx.facts["profile"] = write_provider(settings.target, filed, engine, source, ctx)
    if settings.threads is not None:
        size = settings.tuned_for.batch_size
        write_threads(settings.threads, settings.target, settings.dtype, reference, size, ctx)


def _write_all(
    graphs: list[Graph], settings: OnnxSettings, reference: Reference, ctx: Context
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Write all graphs; return by graph what the report tells of it, and of which modules its nodes are."""
    batch = reference.batch
    tokens = None if isinstance(batch, ImageBatch) else batch.input_ids[batch.attention_mask == 1]
    facts: dict[str, dict[str, Any]] = {}
    homes: dict[str, dict[str, str]] = {}
    for at, graph in enumerate(graphs):
        ctx.progress(at, len(graphs) + 1, graph.name)
        facts[graph.name] = _write(graph, settings, tokens, ctx, homes)
    return facts, homes


def _require_runtime(settings: OnnxSettings, ctx: Context) -> None:
    """Look for OpenVINO before any work, where it is the target; warn where it has no bf16 here.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if settings.target != "openvino":
        return
    from smelt.runtime.backends.openvino_module import has_bf16, import_openvino

    import_openvino()
    if settings.dtype == "bf16" and not has_bf16():
        ctx.warnings.append(
            "this processor has no bf16, as OpenVINO says, so it chooses another precision here: parity,"
            " scores and times of this artifact say nothing of a processor that has it"
        )


def _require_memory(model: Any, settings: OnnxSettings) -> None:
    """Refuse an export whose copies of the weights, beside the model, do not fit.

    Raises:
        RunError: they do not fit.
    """
    weights = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    # the exported graph holds them once more; converting and simplifying hold two graphs at a time
    copies = 2 if settings.simplify or _in_file(settings) != "fp32" else 1
    require_memory(
        copies * sum(weights.values()),
        "onnx: exporting",
        "Give simplify: false, make the model smaller first, or take a machine with more memory.",
    )


def _kind(model: Any, settings: OnnxSettings) -> str:
    """Return which tolerance holds for the files: of the scheme that is least exact, or of their dtype.

    Raises:
        InputError: the target cannot run the model's quantized layers.
    """
    from smelt.runtime.layers.quantized import QuantizedLinear, scheme_of
    from smelt.runtime.schemes.registry import SCHEMES

    found = {scheme_of(m) for m in model.modules()}
    _require_target([s for name, s in SCHEMES.items() if name in found], settings.target)
    if found & set(SCHEMES) and _in_file(settings) != "fp32":
        raise InputError(
            f"onnx: dtype {settings.dtype} of a quantized model is not there: its scales would lose digits."
            " Set dtype: fp32; the products run in int8 whatever it is."
        )
    products = [m.matrix for m in model.modules() if isinstance(m, QuantizedLinear)]
    rounded = {m.scheme.name for m in products if m.scheme.rounds_activations(m.options)}
    names = [name for name in reversed(SCHEMES) if name in rounded]
    return max(names, key=lambda name: SCHEMES[name].drift, default=_in_file(settings))


def _opset(settings: OnnxSettings, model: Any) -> int:
    """Return the opset of the settings, or a newer one that operators of the model's codes need."""
    from smelt.runtime.layers.quantized import scheme_of
    from smelt.runtime.schemes.registry import SCHEMES

    names = {scheme_of(module) for module in model.modules()} & set(SCHEMES)
    return max([settings.opset, *(SCHEMES[n].oldest_opset.get(settings.graphs_of, 0) for n in names)])


def _in_file(settings: OnnxSettings) -> str:
    """Return the precision of the file; OpenVINO makes its bf16 of float32."""
    return "fp32" if settings.target == "openvino" else settings.dtype


def _require_target(schemes: list[Scheme], target: str) -> None:
    """Refuse to export for a target that cannot run all of `schemes`.

    Raises:
        InputError: it cannot.
    """
    from smelt.runtime.schemes.registry import schemes_for, targets_of

    refused = [scheme.refused[of] for scheme in schemes if (of := graphs_for(target)) in scheme.refused]
    if refused:
        fit = targets_of(schemes)
        names = " and ".join(sorted(s.name for s in schemes))
        why = f"onnx: target {target} cannot run a model that was quantized with scheme {names}: {refused[0]}"
        before = "Branch off before the quantize step with `from: NAME`"
        if not fit:
            raise InputError(f"{why}. {before}, or quantize with {' or '.join(schemes_for(target))}.")
        raise InputError(
            f"{why}, which only {' and '.join(fit)} does. {before}, or set target: {' or '.join(fit)}."
        )


def _batch(parent: Any, folder: Path, ctx: Context) -> Batch | ImageBatch:
    """Return the rows that parity is asked on; a warning says if they are made up."""
    from smelt.export.parity.rows import rows_for

    batch, real = rows_for(parent, folder, ctx.data, ctx.task)
    if not real:
        what = "images" if ctx.task == IMAGES else "token ids"
        ctx.warnings.append(f"parity was checked on made-up {what}: there is no train or validation data")
    return batch


def _write(
    graph: Graph,
    settings: OnnxSettings,
    tokens: Tokens | None,
    ctx: Context,
    homes: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Export one graph and simplify it, in float32; return what the report tells of it.

    Args:
        graph: which.
        settings: the stage's.
        tokens: int64 [n], real ones, to compare the simplified graph on; None of a graph of images.
        ctx: its `out` gets the graph.
        homes: gets by graph the modules that its nodes are of.
    """
    from smelt.export.graph_files import give_defaults, write_graph
    from smelt.export.graphs.gemm import join_biases_file
    from smelt.export.graphs.of_model import export_graph
    from smelt.export.load_time import spell_out_file
    from smelt.export.precision.blocks import homes_of
    from smelt.export.simplify import simplify_file

    began = time.perf_counter()
    path = ctx.out / f"{graph.name}.onnx"
    model = export_graph(graph, settings.graphs_of, ctx.facts["opset"])
    exported = time.perf_counter()
    homes[graph.name] = homes_of(model, graph.module)
    write_graph(model, path)
    del model  # simplifying holds two graphs of its own
    if settings.simplify and (reason := simplify_file(path, tokens)) is not None:
        ctx.warnings.append(f"{graph.name}: not simplified: {reason}")
    spell_out_file(path)
    if settings.target == "ort-cpu":
        join_biases_file(path)
    if graph.optional and settings.graphs_of not in (
        "tensorrt",
        "openvino",
    ):  # to which a default is a constant
        give_defaults(path, graph.optional)
    return {"export_seconds": round(exported - began, 3), "seconds": round(time.perf_counter() - began, 3)}


def _tell_of_tensorrt(target: str, graphs: Iterable[str], ctx: Context) -> None:
    """Warn of what TensorRT would reject: the engine may be built elsewhere, long after this step."""
    if target != "tensorrt":
        return
    from smelt.export.tensorrt.preflight import load_graph, preflight

    paths = [ctx.out / f"{name}.onnx" for name in graphs]
    ctx.warnings.extend(problem.text for path in paths for problem in preflight(load_graph(path), path))


def _checked(path: Path) -> dict[str, Any]:
    """Let ONNX check the finished graph; return how many nodes it has, and of which operators.

    Raises:
        RunError: it is not valid.
    """
    import onnx

    from smelt.export.graph_files import read_graph

    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise RunError(f"{path.name}: the exported graph is not valid ONNX: {error}") from error
    nodes = read_graph(path, values=False).graph.node
    return {"nodes": len(nodes), "operators": dict(Counter(n.op_type for n in nodes).most_common())}
