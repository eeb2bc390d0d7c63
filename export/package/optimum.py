"""The form `optimum`: graphs under the names and with the inputs that Optimum's ORTModel classes open."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import ClassVar

from smelt.core.artifact import Artifact
from smelt.core.data import SIMILARITY
from smelt.core.files import read_json
from smelt.export.package.form import GRAPHS_OF_TEXTS, HowTo, Origin, Takes
from smelt.export.package.hub.generation import generation_words
from smelt.export.package.hub.tokenizer_files import copy_tokenizer_files, more_for, notes_on_texts, prefixed
from smelt.runtime.causal import is_causal
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.text.sentence_files import FILES as SENTENCE_FILES

ENCODER, DECODER, MODEL = "encoder_model", "decoder_with_past_model", "model"
FIRST, MERGED = "decoder_model", "decoder_model_merged"
_REQUIRES = "pip install 'optimum-onnx[onnxruntime]==0.1.0'"
_CLASSES = {
    "seq2seq": "ORTModelForSeq2SeqLM",
    "causal": "ORTModelForCausalLM",
    "sentence": "ORTModelForFeatureExtraction",
    "classifier": "ORTModelForSequenceClassification",
}


class Optimum:
    """`ORTModelFor...from_pretrained(folder)`: the API of transformers on ONNX Runtime."""

    name: ClassVar[str] = "optimum"
    summary: ClassVar[str] = "a folder that the ORTModelFor... classes of Optimum open"
    takes: ClassVar[Takes] = GRAPHS_OF_TEXTS
    keeps: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require what Optimum reads out of the config.

        Raises:
            InputError: it would make other caches than the graph takes.
        """
        from smelt.export.package.hub.first_caches import require_a_cache_for_each_layer, require_float_caches

        graph = DECODER if kind_of(artifact) == "seq2seq" else MODEL
        require_float_caches(artifact.path, graph, "Optimum")
        require_a_cache_for_each_layer(artifact.path, graph, "Optimum")

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Write graphs, configs and tokenizer.

        Raises:
            InputError: the tokenizer has no tokenizer_config.json.
            RunError: a graph is made otherwise than this form knows.
        """
        source, kind = artifact.path, kind_of(artifact)
        copy_tokenizer_files(source, folder)
        sentences = SENTENCE_FILES if kind == "sentence" else ()
        for name in ("config.json", "generation_config.json", *sentences):
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        if kind == "seq2seq":
            _write_translator(source, folder)
        else:
            _write_model(source, folder, kind)
        return HowTo(
            install=f"{_REQUIRES}{more_for(folder)}",
            run=f"python -c {shlex.quote(_one_line(kind, source, origin))}",
            load=(("python", _code(kind, source, origin)),),
            notes=(*_notes(kind, source), *notes_on_texts(source)),
        )


def kind_of(artifact: Artifact) -> str:
    """Return what the exported model is: seq2seq, causal, sentence or classifier.

    A classifier that was trained from a sentence embedder keeps the files of one, so the task decides.
    """
    if (artifact.path / f"{ENCODER}.onnx").is_file():
        return "seq2seq"
    if is_causal(read_json(artifact.path / "config.json")):
        return "causal"
    return "sentence" if artifact.manifest.task == SIMILARITY else "classifier"


def _write_translator(source: Path, folder: Path) -> None:
    """Write both layouts of the decoder that Optimum knows; all graphs share one file of weights.

    It has the name of the encoder's, which Optimum fetches from the Hub by itself.
    """
    import onnx

    from smelt.export.graph_files import data_file, read_graph
    from smelt.export.package.hub.decoders import layout_of
    from smelt.export.package.hub.first_caches import take_any_first_cache
    from smelt.export.weights.shared import share_weights

    graphs = [read_graph(source / f"{name}.onnx", values=False) for name in (ENCODER, DECODER)]
    layout = layout_of(*graphs)
    take_any_first_cache(layout.merged, read_json(source / "config.json"))
    made = {ENCODER: layout.encoder, FIRST: layout.first, DECODER: layout.next, MERGED: layout.merged}
    paths = [folder / f"{name}.onnx" for name in made]
    for path, model in zip(paths, made.values(), strict=True):
        onnx.save(model, path)
    share_weights(paths, data_file(paths[0]).name, source)
    for path in paths:
        onnx.checker.check_model(str(path))


def _write_model(source: Path, folder: Path, kind: str) -> None:
    """Write the one graph of every other model."""
    import onnx

    from smelt.export.graph_files import data_names, read_graph
    from smelt.export.package.hub.decoders import name_batch
    from smelt.export.package.hub.first_caches import take_any_first_cache
    from smelt.export.package.hub.hidden_states import give_hidden_states

    path = folder / f"{MODEL}.onnx"
    model = read_graph(source / path.name, values=False)
    for name in data_names(model):
        shutil.copyfile(source / name, folder / name)
    name_batch(model.graph)
    if kind == "causal":
        take_any_first_cache(model, read_json(source / "config.json"))
    elif kind == "sentence":
        give_hidden_states(model)
    onnx.save(model, path)
    onnx.checker.check_model(str(path))


def _notes(kind: str, source: Path) -> list[str]:
    notes = []
    if kind == "seq2seq":
        notes.append(
            "Both layouts of the decoder are here, on one file of weights: `use_merged=False` takes"
            f" `{FIRST}.onnx` and `{DECODER}.onnx`, otherwise Optimum takes `{MERGED}.onnx`."
        )
    if kind == "sentence":
        notes.append(
            "`sentence_embedding` of the graph is the finished vector; Optimum's class gives only"
            " `last_hidden_state`, which has to be pooled as modules.json says."
        )
    if (source / SHORTLIST).is_file():
        notes.append(
            "The model has a shortlist, with which smelt scored it. Optimum does not know it and chooses"
            " from the whole vocabulary: texts may differ, and a step takes longer."
        )
    return notes


def _opening(kind: str, folder: str) -> list[str]:
    name = _CLASSES[kind]
    merged = ", use_merged=False" if kind == "seq2seq" else ""
    return [
        f"from optimum.onnxruntime import {name}",
        "from transformers import AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})",
        f"model = {name}.from_pretrained({folder!r}{merged})",
    ]


def _answer(kind: str, text: str, generation: str = "") -> list[str]:
    lines = [f"inputs = tokenizer([{text!r}], return_tensors='pt', padding=True, truncation=True)"]
    if kind in ("seq2seq", "causal"):
        lines.append(f"found = model.generate(**inputs{generation})")
        return [*lines, "print(tokenizer.batch_decode(found, skip_special_tokens=True))"]
    what = "last_hidden_state" if kind == "sentence" else "logits"
    return [*lines, f"print(model(**inputs).{what})"]


def _one_line(kind: str, source: Path, origin: Origin) -> str:
    answer = _answer(kind, prefixed(source, "TEXT"), generation_words(origin))
    return "; ".join([*_opening(kind, "."), *answer])


def _code(kind: str, source: Path, origin: Origin) -> str:
    text = prefixed(source, "A text.")
    return "\n".join([*_opening(kind, "."), "", *_answer(kind, text, generation_words(origin))])
