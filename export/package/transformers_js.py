"""The format `transformers.js`: a folder that @huggingface/transformers opens in browsers and in Node."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.export.package.hub_files import (
    BERT_TOKENIZER_CLASS,
    FAST_TOKENIZER_CLASS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_JSON_FILE,
    copy_tokenizer_files,
    preprocessing_notes,
    with_prefix,
)
from smelt.export.package.optimum import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
    exported_model_kind,
)
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.generation.shortlist import SHORTLIST_FILE as SHORTLIST
from smelt.models.tokenizer import read_tokenizer_info

ONNX_FOLDER = "onnx"
_PACKAGE = "@huggingface/transformers@4"
_SCRIPTS = (
    "`--ignore-scripts` skips GPU libraries that onnxruntime-node would download; a CPU does not need them."
)
_SUFFIX = {"fp32": "", "q8": "_quantized", "q4": "_q4", "bnb4": "_bnb4"}  # utils/dtypes.js
_CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "sentence": "AutoModel",
    "classifier": "AutoModelForSequenceClassification",
}


class TransformersJsFormat:
    """`pipeline("translation", folder)` in JavaScript."""

    name: ClassVar[str] = "transformers.js"
    summary: ClassVar[str] = "a folder for transformers.js, in browsers and Node"
    supported: ClassVar[SupportedArtifacts] = TEXT_GRAPHS
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a tokenizer that tokenizer.json supports, and caches that follow from the config.

        Raises:
            InputError: the tokenizer needs Python, or transformers.js would create other caches.
        """
        from smelt.export.package.hub_files import require_cache_per_layer, require_float_caches

        graph = DECODER_WITH_PAST_GRAPH if exported_model_kind(artifact) == "seq2seq" else MODEL_GRAPH
        require_float_caches(artifact.path, graph, "transformers.js")
        require_cache_per_layer(artifact.path, graph, "transformers.js")
        details = read_tokenizer_info(artifact.path)
        if details.reader == "transformers" and not (artifact.path / TOKENIZER_JSON_FILE).is_file():
            raise InputError(
                f"its tokenizer cannot be written as {TOKENIZER_JSON_FILE}, which transformers.js requires:"
                f" {details.reason}.",
                code="unsupported-tokenizer",
            )

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write graphs, configs and tokenizer.

        Raises:
            InputError: tokenizer.json would tokenize differently.
            RunError: this format does not support the structure of a graph.
        """
        source, kind = artifact.path, exported_model_kind(artifact)
        _write_tokenizer(source, folder)
        graphs = _named_graphs(source, kind)
        dtype = transformers_js_dtype(graphs.values())
        outside = _write_graphs(graphs, folder / ONNX_FOLDER, _SUFFIX[dtype])
        config = read_json_object(source / "config.json")
        config["transformers.js_config"] = {"dtype": dtype} | (
            {"use_external_data_format": True} if outside else {}
        )
        write_json(folder / "config.json", config)
        if generation := read_json_object(source / "generation_config.json"):
            generation.pop("num_beams", None)
            write_json(folder / "generation_config.json", generation)
        code = shlex.quote(_example_code(kind, source, "; "))
        return UsageNotes(
            install=f"npm install --ignore-scripts {_PACKAGE}",
            run=f"node --input-type=module -e {code}",
            examples=(("javascript", _example_code(kind, source, "\n")),),
            notes=(_SCRIPTS, *_notes(kind, source, dtype), *preprocessing_notes(source)),
        )


def transformers_js_dtype(graphs: Any) -> str:
    """Return the dtype of the weights of onnx.ModelProtos in terms of transformers.js: one of `_SUFFIX`."""
    from onnx import helper

    from smelt.quantization.schemes.registry import quantized_operators

    found, quantized = set(), quantized_operators()
    for model in graphs:
        for node in model.graph.node:
            if node.op_type == "MatMulNBits":
                bits = next((a for a in node.attribute if a.name == "bits"), None)
                found.add("q4" if bits is not None and helper.get_attribute_value(bits) < 8 else "q8")
            elif node.op_type == "MatMulBnb4":
                found.add("bnb4")
            elif node.op_type in quantized:
                found.add("q8")
    return "q8" if "q8" in found else next(iter(found), "fp32")


def _named_graphs(source: Path, kind: str) -> dict[str, Any]:
    """Return the graphs by their names, with their weights."""
    from smelt.export.graph_files import read_graph
    from smelt.export.package.optimum_decoders import add_hidden_states_output, name_batch, optimum_graphs

    if kind == "seq2seq":
        encoder, decoder = (
            read_graph(source / f"{name}.onnx") for name in (ENCODER_GRAPH, DECODER_WITH_PAST_GRAPH)
        )
        layout = optimum_graphs(encoder, decoder)
        return {ENCODER_GRAPH: layout.encoder, MERGED_DECODER_GRAPH: layout.merged_decoder}
    model = read_graph(source / f"{MODEL_GRAPH}.onnx")
    name_batch(model.graph)
    if kind == "sentence":
        add_hidden_states_output(model)
    return {MODEL_GRAPH: model}


def _write_graphs(graphs: dict[str, Any], folder: Path, suffix: str) -> bool:
    """Write each graph as one file; return whether one needed external weights."""
    import onnx

    from smelt.export.graph_files import external_data_path, write_graph

    folder.mkdir()
    paths = [folder / f"{name}{suffix}.onnx" for name in graphs]
    for path, model in zip(paths, graphs.values(), strict=True):
        write_graph(model, path)
        onnx.checker.check_model(str(path))
    return any(external_data_path(path).is_file() for path in paths)


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json and its config; Marian's is converted from its SentencePiece model."""
    details = read_tokenizer_info(source)
    if details.reader != "sentencepiece":
        copy_tokenizer_files(source, folder)
        config = read_json_object(folder / TOKENIZER_CONFIG_FILE)
        # only their own classes create token types there
        config["tokenizer_class"] = BERT_TOKENIZER_CLASS if details.types else FAST_TOKENIZER_CLASS
        write_json(folder / TOKENIZER_CONFIG_FILE, config)
        return
    from smelt.export.package.marian_tokenizer_json import write_marian_tokenizer_json

    write_marian_tokenizer_json(source, folder)
    words = {place: word for word, place in details.added.items()}
    roles = {"eos_token": details.eos, "pad_token": details.pad, "unk_token": details.unknown}
    config = {
        "tokenizer_class": FAST_TOKENIZER_CLASS,
        "model_max_length": details.longest,
        "clean_up_tokenization_spaces": False,
    }
    config |= {role: words[place] for role, place in roles.items() if place in words}
    write_json(folder / TOKENIZER_CONFIG_FILE, config)


def _notes(kind: str, source: Path, dtype: str) -> list[str]:
    notes = [
        f"The weights are in {dtype!r}, which transformers.js 4 reads from config.json; for version 3 set"
        f" `{{ dtype: {dtype!r} }}` when you open the model."
    ]
    if kind in ("seq2seq", "causal"):
        notes.append(
            "transformers.js (4.3) uses greedy search, and in a batch a finished text continues until all are"
            " finished: run one text at a time."
        )
    if read_tokenizer_info(source).reader == "sentencepiece":
        notes.append(
            "tokenizer.json was compared with the model's own tokenizer on 10,000 texts. transformers.js has"
            " its own Unicode normalization (NFKC); rare characters may differ."
        )
    if (source / SHORTLIST).is_file():
        notes.append(
            "The model was scored with a shortlist, which transformers.js does not support. It uses the whole"
            " vocabulary, so texts may differ and a step takes longer."
        )
    return notes


def _example_code(kind: str, source: Path, end: str) -> str:
    """Return JavaScript that opens the current folder and runs the model on a text."""
    name = _CLASSES[kind]
    lines = [
        f'import {{ AutoTokenizer, {name}, env }} from "@huggingface/transformers"',
        'import { basename } from "node:path"',
        'env.allowRemoteModels = false, env.localModelPath = ".."',
        "const folder = basename(process.cwd())",
        "const tokenizer = await AutoTokenizer.from_pretrained(folder)",
        f"const model = await {name}.from_pretrained(folder)",
        f"const texts = [{json.dumps(with_prefix(source, 'TEXT'))}]",
        "const inputs = await tokenizer(texts, { padding: true, truncation: true })",
    ]
    if kind in ("seq2seq", "causal"):
        lines.append("const found = await model.generate(inputs)")
        lines.append("console.log(tokenizer.batch_decode(found, { skip_special_tokens: true }))")
    else:
        what = "sentence_embedding" if kind == "sentence" else "logits"
        lines.append(f"console.log((await model(inputs)).{what}.tolist())")
    return end.join(lines)
