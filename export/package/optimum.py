"""The format `optimum`: graphs with the names and inputs that Optimum's ORTModel classes open."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import ClassVar

from smelt.core.artifact import Artifact
from smelt.core.files import read_json_object
from smelt.data.splits import SENTENCE_SIMILARITY
from smelt.export.package.hub_files import (
    copy_tokenizer_files,
    extra_requirements,
    generate_arguments,
    preprocessing_notes,
    with_prefix,
)
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.generation.runners import is_causal
from smelt.generation.shortlist import SHORTLIST_FILE as SHORTLIST
from smelt.models.text_rules import SENTENCE_FILES

ENCODER_GRAPH, DECODER_WITH_PAST_GRAPH, MODEL_GRAPH = "encoder_model", "decoder_with_past_model", "model"
FIRST_DECODER_GRAPH, MERGED_DECODER_GRAPH = "decoder_model", "decoder_model_merged"
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
        from smelt.export.package.hub_files import require_cache_per_layer, require_float_caches

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
    return "sentence" if artifact.manifest.task == SENTENCE_SIMILARITY else "classifier"


def _write_encoder_decoder(source: Path, folder: Path) -> None:
    """Write both layouts of the decoder that Optimum supports; all graphs share one weight file.

    It has the name of the encoder's, which Optimum downloads from the Hub.
    """
    import onnx

    from smelt.export.graph_files import external_data_path, read_graph, share_weights
    from smelt.export.package.hub_files import accept_any_empty_cache
    from smelt.export.package.optimum_decoders import optimum_graphs

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

    from smelt.export.graph_files import external_data_names, read_graph
    from smelt.export.package.hub_files import accept_any_empty_cache
    from smelt.export.package.optimum_decoders import add_hidden_states_output, name_batch

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
    merged = ", use_merged=False" if kind == "seq2seq" else ""
    return [
        f"from optimum.onnxruntime import {name}",
        "from transformers import AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})",
        f"model = {name}.from_pretrained({folder!r}{merged})",
    ]


def _inference_code(kind: str, text: str, generation: str = "") -> list[str]:
    lines = [f"inputs = tokenizer([{text!r}], return_tensors='pt', padding=True, truncation=True)"]
    if kind in ("seq2seq", "causal"):
        lines.append(f"found = model.generate(**inputs{generation})")
        return [*lines, "print(tokenizer.batch_decode(found, skip_special_tokens=True))"]
    what = "last_hidden_state" if kind == "sentence" else "logits"
    return [*lines, f"print(model(**inputs).{what})"]


def _shell_command(kind: str, source: Path, origin: PackageOrigin) -> str:
    answer = _inference_code(kind, with_prefix(source, "TEXT"), generate_arguments(origin))
    return "; ".join([*_loading_code(kind, "."), *answer])


def _example_code(kind: str, source: Path, origin: PackageOrigin) -> str:
    text = with_prefix(source, "A text.")
    return "\n".join(
        [*_loading_code(kind, "."), "", *_inference_code(kind, text, generate_arguments(origin))]
    )
