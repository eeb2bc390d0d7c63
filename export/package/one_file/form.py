"""The form `one-file`: one ONNX file that answers in one call, in any language that has ONNX Runtime."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.export.package.form import GRAPHS_OF_TEXTS, HowTo, Origin, Takes
from smelt.export.package.one_file.how_to import GENERATES, NUMBERS, STRINGS, answers_of, how_to

if TYPE_CHECKING:
    from smelt.export.package.one_file.text_graph import TextPlan
    from smelt.runtime.generate.decoding import Decoding

_NOT_COPIED = (".onnx", ".onnx_data")


class OneFile:
    """Weights, the loop over tokens and, where that is exact, the tokenizer lie in one graph."""

    name: ClassVar[str] = "one-file"
    summary: ClassVar[str] = "one ONNX file: weights, loop, and the tokenizer where exact"
    takes: ClassVar[Takes] = GRAPHS_OF_TEXTS
    keeps: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a graph for the whole task, of less than 2 GB.

        Raises:
            InputError: there is none.
        """
        from smelt.export.package.one_file.whole_graph import decoding_of, graph_for

        decoding = decoding_of(artifact.path, {}) if artifact.manifest.task in GENERATES else None
        graph_for(artifact.path, decoding)

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Write the graph that takes numbers, and the one that takes strings where that is exact.

        Raises:
            InputError: the run's settings of generation are none for a graph.
        """
        import onnx

        from smelt.export.package.one_file.whole_graph import decoding_of, graph_for, whole_graph

        task, config = artifact.manifest.task, read_json(artifact.path / "config.json")
        try:
            decoding = decoding_of(artifact.path, origin.generation) if task in GENERATES else None
        except InputError as error:
            raise InputError(f"This cannot be one file: {error}", code=error.code) from error
        path = graph_for(artifact.path, decoding)
        vocabulary = int(config.get("decoder_vocab_size") or config["vocab_size"])
        model = whole_graph(path, decoding, vocabulary)
        onnx.save(model, folder / NUMBERS)
        for name in artifact.manifest.files:
            if not name.endswith(_NOT_COPIED):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.path / name, folder / name)
        awkward: list[str] = []
        why = None
        try:
            awkward = _write_strings(artifact.path, model, decoding, vocabulary, folder / STRINGS)
        except InputError as error:
            why = str(error)
        return how_to(folder, answers_of(task, config), why, awkward)


def _write_strings(
    source: Path, model: Any, decoding: Decoding | None, vocabulary: int, path: Path
) -> list[str]:
    """Write the graph from strings to strings, return awkward texts that it reads otherwise.

    Raises:
        InputError: the tokenizer cannot be in the graph; the message says why.
    """
    import onnx

    from smelt.export.package.one_file.compare import open_session, require_same
    from smelt.export.package.one_file.text_graph import text_graph
    from smelt.runtime.causal import is_causal
    from smelt.runtime.text.limits import length_limit
    from smelt.runtime.text.open_tokenizer import open_tokenizer

    config, tokenizer = read_json(source / "config.json"), open_tokenizer(source)
    causal, limit = is_causal(config), length_limit(tokenizer, config)
    plan = plan_of(source, decoding, vocabulary)
    eos = None if decoding is None else decoding.eos
    awkward = require_same(plan, tokenizer, limit, vocabulary, eos, causal)
    made = text_graph(model, plan, decoding, causal)
    onnx.save(made, path)
    open_session(str(path))
    return awkward


def plan_of(source: Path, decoding: Decoding | None, vocabulary: int) -> TextPlan:
    """Return what makes a graph of the artifact in `source` take and give strings.

    Raises:
        InputError: no operator reads texts as its tokenizer does.
    """
    from smelt.core.labels import SINGLE, class_names, problem_type
    from smelt.export.package.one_file.read_texts import Rows, cutter_of, specials_of
    from smelt.export.package.one_file.text_graph import TextPlan
    from smelt.export.package.one_file.write_texts import surfaces_of
    from smelt.runtime.causal import is_causal
    from smelt.runtime.generate.decoding import MAX_NEW_TOKENS
    from smelt.runtime.generate.prompts import pad_of
    from smelt.runtime.text.limits import length_limit
    from smelt.runtime.text.open_tokenizer import open_tokenizer
    from smelt.runtime.text.tokenizing_file import read_tokenizing

    config, details, tokenizer = (
        read_json(source / "config.json"),
        read_tokenizing(source),
        open_tokenizer(source),
    )
    limit, causal = length_limit(tokenizer, config), is_causal(config)
    cutter, (before, after) = cutter_of(source, details), specials_of(tokenizer)
    empty = None
    if causal and decoding is not None:
        limit = max(1, limit // 2, limit + 1 - (decoding.max_new_tokens or MAX_NEW_TOKENS))
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        empty = None if before or after else begin
    pad = pad_of(tokenizer) if causal else tokenizer.pad_token_id or 0
    ends = causal or details.truncation_side == "left"
    room = limit - len(before) - len(after)
    rows = Rows(before, after, room, pad, left=causal, keeps_end=ends, empty=empty)
    surfaces = None if decoding is None else surfaces_of(source, details, vocabulary)
    classifies = surfaces is None and problem_type(config) == SINGLE and "id2label" in config
    labels = tuple(class_names(config)) if classifies else ()
    return TextPlan(cutter, rows, tokenizer.prefix, tokenizer.lower, surfaces, labels)
