"""The form `transformers.js`: the folder that @huggingface/transformers opens in browsers and in Node."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.export.package.form import GRAPHS_OF_TEXTS, HowTo, Origin, Takes
from smelt.export.package.hub.tokenizer_files import (
    CONFIG,
    FAST,
    OF_TYPES,
    TOKENS,
    copy_tokenizer_files,
    notes_on_texts,
    prefixed,
)
from smelt.export.package.optimum import DECODER, ENCODER, MERGED, MODEL, kind_of
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.text.tokenizing_file import read_tokenizing

GRAPHS = "onnx"
_PACKAGE = "@huggingface/transformers@4"
_SCRIPTS = "`--ignore-scripts` leaves out what onnxruntime-node would fetch for GPUs; a CPU needs none of it."
_SUFFIX = {"fp32": "", "q8": "_quantized", "q4": "_q4", "bnb4": "_bnb4"}  # utils/dtypes.js
_CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "sentence": "AutoModel",
    "classifier": "AutoModelForSequenceClassification",
}


class TransformersJs:
    """`pipeline("translation", folder)` in JavaScript."""

    name: ClassVar[str] = "transformers.js"
    summary: ClassVar[str] = "a folder that transformers.js opens in browsers and Node"
    takes: ClassVar[Takes] = GRAPHS_OF_TEXTS
    keeps: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a tokenizer that a tokenizer.json can hold, and caches that follow from the config.

        Raises:
            InputError: it runs in Python alone, or transformers.js would make other caches.
        """
        from smelt.export.package.hub.first_caches import require_a_cache_for_each_layer, require_float_caches

        graph = DECODER if kind_of(artifact) == "seq2seq" else MODEL
        require_float_caches(artifact.path, graph, "transformers.js")
        require_a_cache_for_each_layer(artifact.path, graph, "transformers.js")
        details = read_tokenizing(artifact.path)
        if details.reader == "transformers" and not (artifact.path / TOKENS).is_file():
            raise InputError(
                f"its tokenizer cannot be a {TOKENS}, which transformers.js reads: {details.reason}.",
                code="unsupported-tokenizer",
            )

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Write graphs, configs and tokenizer.

        Raises:
            InputError: as a tokenizer.json the tokenizer would read otherwise.
            RunError: a graph is made otherwise than this form knows.
        """
        source, kind = artifact.path, kind_of(artifact)
        _write_tokenizer(source, folder)
        graphs = _graphs(source, kind)
        dtype = dtype_of(graphs.values())
        outside = _write_graphs(graphs, folder / GRAPHS, _SUFFIX[dtype])
        config = read_json(source / "config.json")
        config["transformers.js_config"] = {"dtype": dtype} | (
            {"use_external_data_format": True} if outside else {}
        )
        write_json(folder / "config.json", config)
        if generation := read_json(source / "generation_config.json"):
            generation.pop("num_beams", None)
            write_json(folder / "generation_config.json", generation)
        code = shlex.quote(_code(kind, source, "; "))
        return HowTo(
            install=f"npm install --ignore-scripts {_PACKAGE}",
            run=f"node --input-type=module -e {code}",
            load=(("javascript", _code(kind, source, "\n")),),
            notes=(_SCRIPTS, *_notes(kind, source, dtype), *notes_on_texts(source)),
        )


def dtype_of(graphs: Any) -> str:
    """Return in which of transformers.js's words the weights of onnx.ModelProtos are: one of `_SUFFIX`."""
    from onnx import helper

    from smelt.runtime.schemes.registry import operators

    found, quantized = set(), operators()
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


def _graphs(source: Path, kind: str) -> dict[str, Any]:
    """Return the graphs by their names, with their weights."""
    from smelt.export.graph_files import read_graph
    from smelt.export.package.hub.decoders import layout_of, name_batch
    from smelt.export.package.hub.hidden_states import give_hidden_states

    if kind == "seq2seq":
        encoder, decoder = (read_graph(source / f"{name}.onnx") for name in (ENCODER, DECODER))
        layout = layout_of(encoder, decoder)
        return {ENCODER: layout.encoder, MERGED: layout.merged}
    model = read_graph(source / f"{MODEL}.onnx")
    name_batch(model.graph)
    if kind == "sentence":
        give_hidden_states(model)
    return {MODEL: model}


def _write_graphs(graphs: dict[str, Any], folder: Path, suffix: str) -> bool:
    """Write each graph as one file; return whether the weights of one were too many for it."""
    import onnx

    from smelt.export.graph_files import data_file, write_graph

    folder.mkdir()
    paths = [folder / f"{name}{suffix}.onnx" for name in graphs]
    for path, model in zip(paths, graphs.values(), strict=True):
        write_graph(model, path)
        onnx.checker.check_model(str(path))
    return any(data_file(path).is_file() for path in paths)


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json and its config; Marian's is made of its SentencePiece model."""
    details = read_tokenizing(source)
    if details.reader != "sentencepiece":
        copy_tokenizer_files(source, folder)
        said = read_json(folder / CONFIG)
        # only classes of their own make token types there
        said["tokenizer_class"] = OF_TYPES if details.types else FAST
        write_json(folder / CONFIG, said)
        return
    from smelt.export.package.hub.pieces import write_unigram

    write_unigram(source, folder)
    words = {place: word for word, place in details.added.items()}
    roles = {"eos_token": details.eos, "pad_token": details.pad, "unk_token": details.unknown}
    said = {
        "tokenizer_class": FAST,
        "model_max_length": details.longest,
        "clean_up_tokenization_spaces": False,
    }
    said |= {role: words[place] for role, place in roles.items() if place in words}
    write_json(folder / CONFIG, said)


def _notes(kind: str, source: Path, dtype: str) -> list[str]:
    notes = [
        f"The weights are in {dtype!r}, which config.json tells transformers.js 4; for version 3 give"
        f" `{{ dtype: {dtype!r} }}` where the model is opened."
    ]
    if kind in ("seq2seq", "causal"):
        notes.append(
            "transformers.js (4.3) searches greedily, and in a batch a text that has ended goes on until all"
            " have: give one text at a time."
        )
    if read_tokenizing(source).reader == "sentencepiece":
        notes.append(
            "tokenizer.json was compared with the model's own tokenizer on 10,000 texts. transformers.js"
            " brings characters into their usual form (NFKC) by rules of its own; rare ones may differ."
        )
    if (source / SHORTLIST).is_file():
        notes.append(
            "The model has a shortlist, with which smelt scored it. transformers.js does not know it and"
            " chooses from the whole vocabulary: texts may differ, and a step takes longer."
        )
    return notes


def _code(kind: str, source: Path, end: str) -> str:
    """Return JavaScript that opens the folder it is run in and answers a text."""
    name = _CLASSES[kind]
    lines = [
        f'import {{ AutoTokenizer, {name}, env }} from "@huggingface/transformers"',
        'import { basename } from "node:path"',
        'env.allowRemoteModels = false, env.localModelPath = ".."',
        "const folder = basename(process.cwd())",
        "const tokenizer = await AutoTokenizer.from_pretrained(folder)",
        f"const model = await {name}.from_pretrained(folder)",
        f"const texts = [{json.dumps(prefixed(source, 'TEXT'))}]",
        "const inputs = await tokenizer(texts, { padding: true, truncation: true })",
    ]
    if kind in ("seq2seq", "causal"):
        lines.append("const found = await model.generate(inputs)")
        lines.append("console.log(tokenizer.batch_decode(found, { skip_special_tokens: true }))")
    else:
        what = "sentence_embedding" if kind == "sentence" else "logits"
        lines.append(f"console.log((await model(inputs)).{what}.tolist())")
    return end.join(lines)
