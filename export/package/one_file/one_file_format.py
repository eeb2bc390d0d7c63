"""The format `one-file`: one ONNX file that answers in one call, in any language with ONNX Runtime."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.export.package.one_file.usage_examples import (
    GENERATION_TASKS,
    NUMBERS_FILE,
    STRINGS_FILE,
    answer_outputs,
    write_usage_examples,
)
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes

if TYPE_CHECKING:
    from smelt.export.package.one_file.text_graph import TextPlan
    from smelt.runtime.generate.generation_config import GenerationConfig

_NOT_COPIED = (".onnx", ".onnx_data")


class OneFileFormat:
    """Weights, the generation loop and, where it is exact, the tokenizer are in one graph."""

    name: ClassVar[str] = "one-file"
    summary: ClassVar[str] = "one ONNX file: weights, generation loop, tokenizer if exact"
    supported: ClassVar[SupportedArtifacts] = TEXT_GRAPHS
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a graph for the whole task, of less than 2 GB.

        Raises:
            InputError: there is none.
        """
        from smelt.export.package.one_file.self_contained_graph import generation_config_of, select_graph

        decoding = (
            generation_config_of(artifact.path, {}) if artifact.manifest.task in GENERATION_TASKS else None
        )
        select_graph(artifact.path, decoding)

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write the graph with token inputs, and the graph with string inputs if it is exact.

        Raises:
            InputError: a graph does not support the run's generation settings.
        """
        import onnx

        from smelt.export.package.one_file.self_contained_graph import (
            generation_config_of,
            select_graph,
            self_contained_graph,
        )

        task, config = artifact.manifest.task, read_json_object(artifact.path / "config.json")
        try:
            decoding = (
                generation_config_of(artifact.path, origin.generation) if task in GENERATION_TASKS else None
            )
        except InputError as error:
            raise InputError(
                f"This model cannot be packaged as one file: {error}", code=error.code
            ) from error
        path = select_graph(artifact.path, decoding)
        vocabulary = int(config.get("decoder_vocab_size") or config["vocab_size"])
        model = self_contained_graph(path, decoding, vocabulary)
        onnx.save(model, folder / NUMBERS_FILE)
        for name in artifact.manifest.files:
            if not name.endswith(_NOT_COPIED):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.path / name, folder / name)
        awkward: list[str] = []
        why = None
        try:
            awkward = _write_text_graph(artifact.path, model, decoding, vocabulary, folder / STRINGS_FILE)
        except InputError as error:
            why = str(error)
        return write_usage_examples(folder, answer_outputs(task, config), why, awkward)


def _write_text_graph(
    source: Path, model: Any, decoding: GenerationConfig | None, vocabulary: int, path: Path
) -> list[str]:
    """Write the graph from strings to strings; return edge-case texts that it tokenizes differently.

    Raises:
        InputError: the tokenizer cannot be in the graph; the message gives the reason.
    """
    import onnx

    from smelt.export.package.one_file.text_graph import text_graph
    from smelt.export.package.one_file.verify_tokenizer import open_extensions_session, require_equal_tokens
    from smelt.runtime.causal import is_causal
    from smelt.runtime.text.length_limits import max_input_length
    from smelt.runtime.text.open_tokenizer import open_tokenizer

    config, tokenizer = read_json_object(source / "config.json"), open_tokenizer(source)
    causal, limit = is_causal(config), max_input_length(tokenizer, config)
    plan = make_text_plan(source, decoding, vocabulary)
    eos = None if decoding is None else decoding.eos
    awkward = require_equal_tokens(plan, tokenizer, limit, vocabulary, eos, causal)
    made = text_graph(model, plan, decoding, causal)
    onnx.save(made, path)
    open_extensions_session(str(path))
    return awkward


def make_text_plan(source: Path, decoding: GenerationConfig | None, vocabulary: int) -> TextPlan:
    """Return the plan of a graph of the artifact in `source` with string inputs and outputs.

    Raises:
        InputError: no operator tokenizes texts as its tokenizer does.
    """
    from smelt.core.labels import SINGLE_LABEL, class_names, problem_type
    from smelt.export.package.one_file.detokenize_nodes import token_texts
    from smelt.export.package.one_file.text_graph import TextPlan
    from smelt.export.package.one_file.tokenize_nodes import RowLayout, special_tokens_around, tokenizer_nodes
    from smelt.runtime.causal import is_causal
    from smelt.runtime.generate.generation_config import MAX_NEW_TOKENS
    from smelt.runtime.generate.prompt_batches import padding_token
    from smelt.runtime.text.length_limits import max_input_length
    from smelt.runtime.text.open_tokenizer import open_tokenizer
    from smelt.runtime.text.tokenizer_info import read_tokenizer_info

    config, details, tokenizer = (
        read_json_object(source / "config.json"),
        read_tokenizer_info(source),
        open_tokenizer(source),
    )
    limit, causal = max_input_length(tokenizer, config), is_causal(config)
    cutter, (before, after) = tokenizer_nodes(source, details), special_tokens_around(tokenizer)
    empty = None
    if causal and decoding is not None:
        limit = max(1, limit // 2, limit + 1 - (decoding.max_new_tokens or MAX_NEW_TOKENS))
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        empty = None if before or after else begin
    pad = padding_token(tokenizer) if causal else tokenizer.pad_token_id or 0
    ends = causal or details.truncation_side == "left"
    room = limit - len(before) - len(after)
    rows = RowLayout(before, after, room, pad, pad_left=causal, keep_end=ends, empty_token=empty)
    surfaces = None if decoding is None else token_texts(source, details, vocabulary)
    classifies = surfaces is None and problem_type(config) == SINGLE_LABEL and "id2label" in config
    labels = tuple(class_names(config)) if classifies else ()
    return TextPlan(cutter, rows, tokenizer.prefix, tokenizer.lower, surfaces, labels)
