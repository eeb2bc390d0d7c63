"""The format `optimum`: graphs with the names and inputs that Optimum's ORTModel classes open.

transformers.js reads the same graphs. smelt's encoder also outputs the keys and values of cross-attention,
and the first step of its decoder gets empty caches. In the other layout the encoder outputs only its hidden
states, and the decoder's first graph computes these keys and values from them. So the nodes that compute them
are moved; all others are unchanged. Two graphs of a translation model become four:

| graph | inputs | outputs |
|---|---|---|
| encoder | input_ids, attention_mask | last_hidden_state |
| first | input_ids, encoder_attention_mask, encoder_hidden_states | logits, present of both kinds |
| next | input_ids, encoder_attention_mask, past_key_values of both kinds | logits, present.{i}.decoder |
| merged | of first and next, use_cache_branch bool [1] | as first |

A sentence embedder's graph gets its hidden states [B, L, D] as an output, because other libraries pool them.

Shapes: B = batch, L = source length or tokens, P = past length, H = heads, d = width of a head,
V = vocabulary, D = width; input_ids [B, 1], logits [B, 1, V], caches [B, H, P, d] and [B, H, L, d]. Caches
are ordered as in the tools: key and value of the decoder, then of the encoder. Source of the names:
optimum/onnxruntime/modeling_seq2seq.py (0.1.0).
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import RunError
from smelt.core.files import read_json_object
from smelt.data.tasks import task_traits
from smelt.export.graph_files import external_data_names, external_data_path, read_graph, share_weights
from smelt.export.package.hub_files import (
    accept_any_empty_cache,
    copy_tokenizer_files,
    extra_requirements,
    generate_arguments,
    preprocessing_notes,
    require_cache_per_layer,
    require_float_caches,
    with_prefix,
)
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.generation.backend import past_input_name
from smelt.generation.generating_runners import is_causal
from smelt.models.text_rules import SENTENCE_FILES
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.runtimes.onnx_import.convert_optimum import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_ATTENTION_MASK,
    ENCODER_GRAPH,
    ENCODER_HIDDEN_STATES,
    FIRST_DECODER_GRAPH,
    LAST_HIDDEN_STATE,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
    USE_CACHE_BRANCH,
    copy_message,
    nodes_for_outputs,
    rename_values,
    used_tensors,
    with_name,
)
from smelt.runtimes.single_call_runners import EMBEDDING_OUTPUT

_REQUIRES = "pip install 'optimum-onnx[onnxruntime]==0.1.0'"
_CLASSES = {
    "seq2seq": "ORTModelForSeq2SeqLM",
    "causal": "ORTModelForCausalLM",
    "sentence": "ORTModelForFeatureExtraction",
    "classifier": "ORTModelForSequenceClassification",
}


class OptimumFormat:
    """`ORTModelFor...from_pretrained(folder)`: the API of transformers on ONNX Runtime."""

    name: ClassVar[str] = "optimum"
    summary: ClassVar[str] = "a folder for the ORTModelFor... classes of Optimum"
    supported: ClassVar[SupportedArtifacts] = TEXT_GRAPHS
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a structure that Optimum derives from the config.

        Raises:
            InputError: it would create other caches than the graph accepts.
        """
        graph = DECODER_WITH_PAST_GRAPH if exported_model_kind(artifact) == "seq2seq" else MODEL_GRAPH
        require_float_caches(artifact.path, graph, "Optimum")
        require_cache_per_layer(artifact.path, graph, "Optimum")

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write graphs, configs and tokenizer.

        Raises:
            InputError: the tokenizer has no tokenizer_config.json.
            RunError: this format does not support the structure of a graph.
        """
        source, kind = artifact.path, exported_model_kind(artifact)
        copy_tokenizer_files(source, folder)
        sentences = SENTENCE_FILES if kind == "sentence" else ()
        for name in ("config.json", "generation_config.json", *sentences):
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        if kind == "seq2seq":
            _write_encoder_decoder(source, folder)
        else:
            _write_model(source, folder, kind)
        return UsageNotes(
            install=f"{_REQUIRES}{extra_requirements(folder)}",
            run=f"python -c {shlex.quote(_shell_command(kind, source, origin))}",
            examples=(("python", _example_code(kind, source, origin)),),
            notes=(*_notes(kind, source), *preprocessing_notes(source)),
        )


def exported_model_kind(artifact: Artifact) -> str:
    """Return the kind of the exported model: seq2seq, causal, sentence or classifier.

    A classifier trained from a sentence embedder keeps the embedder's files, so the task decides.
    """
    if (artifact.path / f"{ENCODER_GRAPH}.onnx").is_file():
        return "seq2seq"
    if is_causal(read_json_object(artifact.path / "config.json")):
        return "causal"
    return "sentence" if task_traits(artifact.manifest.task).output == "embedding" else "classifier"


def _write_encoder_decoder(source: Path, folder: Path) -> None:
    """Write both layouts of the decoder that Optimum supports; all graphs share one weight file.

    It has the name of the encoder's, which Optimum downloads from the Hub.
    """
    import onnx

    graphs = [
        read_graph(source / f"{name}.onnx", values=False) for name in (ENCODER_GRAPH, DECODER_WITH_PAST_GRAPH)
    ]
    layout = optimum_graphs(*graphs)
    accept_any_empty_cache(layout.merged_decoder, read_json_object(source / "config.json"))
    decoders = {
        ENCODER_GRAPH: layout.encoder,
        FIRST_DECODER_GRAPH: layout.decoder,
        DECODER_WITH_PAST_GRAPH: layout.decoder_with_past,
        MERGED_DECODER_GRAPH: layout.merged_decoder,
    }
    paths = [folder / f"{name}.onnx" for name in decoders]
    for path, model in zip(paths, decoders.values(), strict=True):
        onnx.save(model, path)
    share_weights(paths, external_data_path(paths[0]).name, source)
    for path in paths:
        onnx.checker.check_model(str(path))


def _write_model(source: Path, folder: Path, kind: str) -> None:
    """Write the only graph of every other model."""
    import onnx

    path = folder / f"{MODEL_GRAPH}.onnx"
    model = read_graph(source / path.name, values=False)
    for name in external_data_names(model):
        shutil.copyfile(source / name, folder / name)
    name_batch(model.graph)
    if kind == "causal":
        accept_any_empty_cache(model, read_json_object(source / "config.json"))
    elif kind == "sentence":
        add_hidden_states_output(model)
    onnx.save(model, path)
    onnx.checker.check_model(str(path))


def _notes(kind: str, source: Path) -> list[str]:
    notes = []
    if kind == "seq2seq":
        notes.append(
            "Both layouts of the decoder are included and share one weight file: with `use_merged=False`"
            f" Optimum uses `{FIRST_DECODER_GRAPH}.onnx` and `{DECODER_WITH_PAST_GRAPH}.onnx`, otherwise"
            f" `{MERGED_DECODER_GRAPH}.onnx`."
        )
    if kind == "sentence":
        notes.append(
            "The graph's output `sentence_embedding` is the final vector; Optimum's class returns only"
            " `last_hidden_state`, which has to be pooled as in modules.json."
        )
    if (source / SHORTLIST).is_file():
        notes.append(
            "The model was scored with a shortlist, which Optimum does not support. It uses the whole"
            " vocabulary, so texts may differ and a step takes longer."
        )
    return notes


def _loading_code(kind: str, folder: str) -> list[str]:
    name = _CLASSES[kind]
    merged_option = ", use_merged=False" if kind == "seq2seq" else ""
    return [
        f"from optimum.onnxruntime import {name}",
        "from transformers import AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})",
        f"model = {name}.from_pretrained({folder!r}{merged_option})",
    ]


def _inference_code(kind: str, text: str, generation: str = "") -> list[str]:
    lines = [f"inputs = tokenizer([{text!r}], return_tensors='pt', padding=True, truncation=True)"]
    if kind in ("seq2seq", "causal"):
        lines.append(f"found = model.generate(**inputs{generation})")
        return [*lines, "print(tokenizer.batch_decode(found, skip_special_tokens=True))"]
    output_field = "last_hidden_state" if kind == "sentence" else "logits"
    return [*lines, f"print(model(**inputs).{output_field})"]


def _shell_command(kind: str, source: Path, origin: PackageOrigin) -> str:
    answer = _inference_code(kind, with_prefix(source, "TEXT"), generate_arguments(origin))
    return "; ".join([*_loading_code(kind, "."), *answer])


def _example_code(kind: str, source: Path, origin: PackageOrigin) -> str:
    text = with_prefix(source, "A text.")
    return "\n".join(
        [*_loading_code(kind, "."), "", *_inference_code(kind, text, generate_arguments(origin))]
    )


_CROSS_PREFIX = "cross."  # prefix of names from the encoder's graph


@dataclass(frozen=True)
class CrossAttentionNodes:
    """The nodes that compute keys and values of cross-attention from `encoder_hidden_states`.

    nodes, weights: NodeProtos and TensorProtos. outputs: ValueInfoProtos, `present.{i}.encoder.*`.
    """

    nodes: list[Any]
    weights: list[Any]
    outputs: list[Any]


@dataclass(frozen=True)
class OptimumGraphs:
    """The four graphs of the table, as onnx.ModelProto."""

    encoder: Any
    decoder: Any
    decoder_with_past: Any
    merged_decoder: Any


def optimum_graphs(encoder: Any, decoder: Any) -> OptimumGraphs:
    """Return the graphs made from smelt's `encoder` and `decoder`, each an onnx.ModelProto.

    Weights may be external; the returned graphs refer to the same files.

    Raises:
        RunError: keys and values depend on more than hidden states.
    """
    cross = _extract_cross_attention(encoder.graph)
    states = with_name(
        next(o for o in encoder.graph.output if o.name == LAST_HIDDEN_STATE), ENCODER_HIDDEN_STATES
    )
    return OptimumGraphs(
        _strip_encoder(encoder),
        _first_decoder(decoder, cross, states),
        _decoder_with_past(decoder),
        _merged_decoder(decoder, cross, states),
    )


def _extract_cross_attention(graph: Any) -> CrossAttentionNodes:
    """Remove the nodes that compute the keys and values from the encoder's `graph`; return copies of them."""
    outputs = [o for o in graph.output if o.name != LAST_HIDDEN_STATE]
    cross_nodes = nodes_for_outputs(graph.node, [o.name for o in outputs], stop=LAST_HIDDEN_STATE)
    renamed = {LAST_HIDDEN_STATE: ENCODER_HIDDEN_STATES, "attention_mask": ENCODER_ATTENTION_MASK}
    renamed["input_ids"] = ENCODER_ATTENTION_MASK  # the mask has the shape of the ids
    renamed |= {o.name: o.name for o in outputs}
    for node in cross_nodes:
        if "input_ids" in node.input and node.op_type != "Shape":
            raise RunError(
                f"encoder_model.onnx: node '{node.name}' ({node.op_type}) computes keys or values of"
                " cross-attention from input_ids, not from the hidden states; this format does not support"
                " it.",
                code="unsupported-graph",
                file="encoder_model.onnx",
            )
    nodes = rename_values(cross_nodes, lambda name: renamed.get(name, _CROSS_PREFIX + name), _CROSS_PREFIX)
    weights = [with_name(w, _CROSS_PREFIX + w.name) for w in used_tensors(graph.initializer, cross_nodes)]
    return CrossAttentionNodes(nodes, weights, [copy_message(o) for o in outputs])


def _strip_encoder(model: Any) -> Any:
    """Return the encoder without the nodes that compute keys and values."""
    nodes = nodes_for_outputs(model.graph.node, [LAST_HIDDEN_STATE])
    outputs = [o for o in model.graph.output if o.name == LAST_HIDDEN_STATE]
    weights = used_tensors(model.graph.initializer, nodes)
    return _make_model(model, nodes, list(model.graph.input), outputs, weights)


def _first_decoder(decoder: Any, cross: CrossAttentionNodes, states: Any) -> Any:
    """Return the decoder's graph for the first token."""
    from onnx import helper

    graph = decoder.graph
    self_caches = [i for i in graph.input if _is_cache(i.name, "decoder")]
    start = [helper.make_node("Shape", ["input_ids"], ["first.batch"], "first.batch", start=0, end=1)]
    weights = [*cross.weights]
    for cache in self_caches:
        nodes, sizes = _empty_cache(cache)
        start += nodes
        weights.append(sizes)
    nodes = [*start, *cross.nodes, *_step_nodes(graph)]
    inputs = [*(i for i in graph.input if not i.name.startswith("past_")), states]
    return _make_model(decoder, nodes, inputs, _cache_outputs(graph, cross), [*graph.initializer, *weights])


def _decoder_with_past(decoder: Any) -> Any:
    """Return the decoder's graph for all other tokens; names from the encoder do not change."""
    graph = decoder.graph
    nodes = list(graph.node)
    logits = _add_token_axis(nodes, graph)
    outputs = [logits, *(o for o in graph.output if o.name != "logits")]
    return _make_model(decoder, nodes, _sort_caches(graph.input), outputs, list(graph.initializer))


def _merged_decoder(decoder: Any, cross: CrossAttentionNodes, states: Any) -> Any:
    """Return one graph for all tokens, with two branches for keys and values of cross-attention."""
    from onnx import TensorProto, helper

    graph = decoder.graph
    names = [o.name for o in cross.outputs]
    # the outputs of both branches have different names
    computed_nodes = rename_values(cross.nodes, lambda name: f"made.{name}" if name in names else name, "")
    outputs = [with_name(o, f"made.{o.name}") for o in cross.outputs]
    given_outputs = [with_name(o, f"given.{o.name}") for o in cross.outputs]
    pasts = [past_input_name(name) for name in names]
    take = [
        helper.make_node("Identity", [p], [g.name], g.name) for p, g in zip(pasts, given_outputs, strict=True)
    ]
    choice = helper.make_node(
        "If", [USE_CACHE_BRANCH], names, "cross_attention",
        then_branch=helper.make_graph(take, "given", [], given_outputs),
        else_branch=helper.make_graph(computed_nodes, "made", [], outputs),
    )  # fmt: skip
    branch = helper.make_tensor_value_info(USE_CACHE_BRANCH, TensorProto.BOOL, [1])
    inputs = [*_sort_caches(graph.input), states, branch]
    nodes = [choice, *_step_nodes(graph)]
    return _make_model(
        decoder, nodes, inputs, _cache_outputs(graph, cross), [*graph.initializer, *cross.weights]
    )


def _step_nodes(graph: Any) -> list[Any]:
    """Return copies of the decoder's nodes that read the keys and values of the same graph."""
    renamed = {
        i.name: f"present.{i.name.removeprefix('past_key_values.')}"
        for i in graph.input
        if _is_cache(i.name, "encoder")
    }
    nodes = rename_values(graph.node, lambda name: renamed.get(name, name), "")
    _add_token_axis(nodes, graph)
    return nodes


def _add_token_axis(nodes: list[Any], graph: Any) -> Any:
    """Make `logits` [B, V] of the list `nodes` [B, 1, V], in place; return their value info."""
    from onnx import helper

    described = copy_message(next(o for o in graph.output if o.name == "logits"))
    used_names = {name for node in nodes for name in (node.name, *node.output)}
    base_name = "logits"
    while used_names & {f"{base_name}.of_token", f"{base_name}.axis"}:  # a package that was read again
        base_name += "_"
    inner, axis_name = f"{base_name}.of_token", f"{base_name}.axis"
    nodes[:] = rename_values(nodes, lambda name: inner if name == "logits" else name, "")
    axis = helper.make_node("Constant", [], [axis_name], axis_name, value_ints=[1])
    nodes += [axis, helper.make_node("Unsqueeze", [inner, axis_name], ["logits"], base_name)]
    dims = described.type.tensor_type.shape.dim
    batch, token_dim = copy_message(dims[0]), copy_message(dims[1])
    del dims[:]
    token_axis = type(batch)(dim_value=1)
    dims.extend([batch, token_axis, token_dim])
    return described


def _cache_outputs(graph: Any, cross: CrossAttentionNodes) -> list[Any]:
    logits = _add_token_axis([], graph)
    return _sort_caches([logits, *(o for o in graph.output if o.name != "logits"), *cross.outputs])


def _empty_cache(cache: Any) -> tuple[list[Any], Any]:
    """Return nodes that compute the empty cache `cache` [B, H, 0, d] from first.batch, and their inputs."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    tensor = cache.type.tensor_type
    _, heads, _, width = (d.dim_value for d in tensor.shape.dim)
    sizes = numpy_helper.from_array(np.array([heads, 0, width]), f"first.sizes.{cache.name}")
    zero = helper.make_tensor("zero", tensor.elem_type or TensorProto.FLOAT, [1], [0.0])
    shape = f"first.shape.{cache.name}"
    return [
        helper.make_node("Concat", ["first.batch", sizes.name], [shape], shape, axis=0),
        helper.make_node("ConstantOfShape", [shape], [cache.name], f"first.{cache.name}", value=zero),
    ], sizes


def _sort_caches(values: Iterable[Any]) -> list[Any]:
    """Return `values` with the caches last, by layer, the decoder's before the encoder's."""

    def cache_order(value: Any) -> tuple[int, int]:
        if not value.name.startswith(("past_key_values.", "present.")):
            return -1, 0
        layer, kind = value.name.split(".")[1:3]
        return int(layer), int(kind == "encoder")

    return sorted(values, key=cache_order)


def _is_cache(name: str, kind: str) -> bool:
    return name.startswith("past_key_values.") and f".{kind}." in name


def name_batch(graph: Any) -> None:
    """Name the batch dimension `batch_size`, in place.

    transformers.js (4.3, `resolveCacheShape`) creates the caches of a first step by this name.
    """
    for value in (*graph.input, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "batch":
                dimension.dim_param = "batch_size"


def _make_model(
    model: Any, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]
) -> Any:
    """Return a model of these parts with the operator sets of `model`."""
    from onnx import helper

    graph = helper.make_graph(nodes, model.graph.name, inputs, outputs, weights)
    name_batch(graph)
    return helper.make_model(
        graph, opset_imports=list(model.opset_import), ir_version=model.ir_version, producer_name="smelt"
    )


def add_hidden_states_output(model: Any) -> None:
    """Add the output `last_hidden_state` float32 [B, L, D] to the onnx.ModelProto of an embedder, in place.

    It is the output of the last norm, which is the input of pooling in all supported encoders.

    Raises:
        RunError: the graph has no such norm.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    last = next((node for node in reversed(graph.node) if node.op_type == "LayerNormalization"), None)
    if last is None:
        raise RunError(
            "model.onnx: it has no LayerNormalization, so its hidden states cannot be found.",
            code="unsupported-graph",
            file="model.onnx",
        )
    width = (
        next(o for o in graph.output if o.name == EMBEDDING_OUTPUT).type.tensor_type.shape.dim[-1].dim_value
    )
    input_dims = graph.input[0].type.tensor_type.shape.dim
    name = last.output[0].removesuffix(".tokens")  # its padded form, see export/remove_padding.py
    for node in graph.node:
        for names in (node.input, node.output):
            for index, candidate in enumerate(names):
                if candidate == name:
                    names[index] = LAST_HIDDEN_STATE
    shape = [
        input_dims[0].dim_param or input_dims[0].dim_value,
        input_dims[1].dim_param or input_dims[1].dim_value,
        width,
    ]
    graph.output.append(helper.make_tensor_value_info(LAST_HIDDEN_STATE, TensorProto.FLOAT, shape))
