"""The format `transformers.js`: a folder that @huggingface/transformers opens in browsers and in Node.

Marian's tokenizer is written as tokenizer.json: its SentencePiece model as a Unigram, with ids of vocab.json.
It is written only if it gives the same ids on 10,000 generated texts: pieces of the vocabulary, with and
without spaces, characters of Unicode's blocks, and edge cases. Texts that begin with `>>` and are not a
language code of the model are left out: Marian takes `>>...<<` for one unknown token, a Unigram splits it.

Source: transformers' convert_slow_tokenizer.py (5.23), `SpmConverter`; sentencepiece's unigram_model.cc.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import shlex
import unicodedata
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.export.graph_files import external_data_path, read_graph, write_graph
from smelt.export.package.hub_files import (
    BERT_TOKENIZER_CLASS,
    FAST_TOKENIZER_CLASS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_JSON_FILE,
    copy_tokenizer_files,
    preprocessing_notes,
    require_cache_per_layer,
    require_float_caches,
    with_prefix,
)
from smelt.export.package.optimum import (
    add_hidden_states_output,
    exported_model_kind,
    name_batch,
    optimum_graphs,
)
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.export.tokenizer import EDGE_CASE_TEXTS
from smelt.models.text_rules import NO_LIMIT
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.models.tokenizer import (
    MARIAN_VOCAB_FILE,
    SENTENCEPIECE_FILE,
    TOKENIZER_FILE,
    MarianTokenizer,
    RustTokenizer,
    TokenizerInfo,
    read_tokenizer_info,
)
from smelt.runtimes.onnx_import.convert_optimum import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
)

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
        has_external_data = _write_graphs(graphs, folder / ONNX_FOLDER, _SUFFIX[dtype])
        config = read_json_object(source / "config.json")
        config["transformers.js_config"] = {"dtype": dtype} | (
            {"use_external_data_format": True} if has_external_data else {}
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

    from smelt.quantization.scheme import QuantizedGraph
    from smelt.quantization.schemes.registry import owner_of_operator

    dtypes = set()
    for model in graphs:
        graph = QuantizedGraph(model.graph)
        for node in model.graph.node:
            if node.op_type == "MatMulNBits":
                bits = next((a for a in node.attribute if a.name == "bits"), None)
                dtypes.add("q4" if bits is not None and helper.get_attribute_value(bits) < 8 else "q8")
            elif node.op_type == "MatMulBnb4":
                dtypes.add("bnb4")
            elif owner_of_operator(node, graph) is not None:
                dtypes.add("q8")
    return "q8" if "q8" in dtypes else next(iter(dtypes), "fp32")


def _named_graphs(source: Path, kind: str) -> dict[str, Any]:
    """Return the graphs by their names, with their weights."""
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

    write_marian_tokenizer_json(source, folder)
    token_by_id = {token_id: token for token, token_id in details.added.items()}
    roles = {"eos_token": details.eos, "pad_token": details.pad, "unk_token": details.unknown}
    config = {
        "tokenizer_class": FAST_TOKENIZER_CLASS,
        "model_max_length": details.longest,
        "clean_up_tokenization_spaces": False,
    }
    config |= {role: token_by_id[token_id] for role, token_id in roles.items() if token_id in token_by_id}
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
        output_name = "sentence_embedding" if kind == "sentence" else "logits"
        lines.append(f"console.log((await model(inputs)).{output_name}.tolist())")
    return end.join(lines)


COMPARED_TEXTS = 10_000
_UNIGRAM_TYPE = 1  # sentencepiece_model.proto, TrainerSpec.ModelType
_NORMAL_PIECE = 1  # ... SentencePiece.Type
# Below every sum of scores of a text's pieces: a token of the target only, one character or several. For one
# character SentencePiece has no piece either, and vocab.json gives its id.
_ALONE, _TOGETHER = -1000.0, -1500.0
_SPACE = "\u2581"
_BLOCKS = ((0x20, 0x7F), (0xA0, 0x250), (0x250, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x1E00, 0x2100),
           (0x2100, 0x2800), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFFFD),
           (0x1F300, 0x1F650))  # fmt: skip


def write_marian_tokenizer_json(source: Path, folder: Path) -> None:
    """Write tokenizer.json of the Marian model in `source` into `folder`.

    Raises:
        InputError: its SentencePiece model is not a Unigram, or tokenizer.json would tokenize differently.
    """
    details = read_tokenizer_info(source)
    _make_unigram(source, details).save(str(folder / TOKENIZER_FILE))
    problem = compare_marian_tokenizers(source, folder, details)
    if problem is not None:
        (folder / TOKENIZER_FILE).unlink()
        raise InputError(
            f"{source / SENTENCEPIECE_FILE}: a tokenizer.json made from it tokenizes differently: {problem}.",
            code="tokenizer-differs",
            file=str(source / SENTENCEPIECE_FILE),
        )


def _make_unigram(source: Path, details: TokenizerInfo) -> Any:
    """Return the tokenizers.Tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    proto = _read_sentencepiece(source / SENTENCEPIECE_FILE)
    if proto.trainer_spec.model_type != _UNIGRAM_TYPE or proto.trainer_spec.byte_fallback:
        raise InputError(
            f"{source / SENTENCEPIECE_FILE}: only SentencePiece Unigram models without byte fallback can be"
            " converted to tokenizer.json.",
            code="unsupported-tokenizer",
            file=str(source / SENTENCEPIECE_FILE),
        )
    tokens = _vocabulary_tokens(source, details)
    scores = {
        model_piece.piece: model_piece.score
        for model_piece in proto.pieces
        if model_piece.type == _NORMAL_PIECE
    }
    vocabulary = [(token, scores.get(token, _added_token_score(token))) for token in tokens]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=details.unknown))
    chars = proto.normalizer_spec.precompiled_charsmap
    steps: list[Any] = [normalizers.Precompiled(chars)] if chars else []
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    metaspace = decoders.Metaspace(prepend_scheme="always", split=False)
    # decoders.Strip panics on an empty text
    ends = decoders.Replace(Regex("^ +| +$"), "")
    tokenizer.decoder = decoders.Sequence([metaspace, decoders.Fuse(), ends])
    special = set(details.special)
    added = [token for token in tokens if token in details.added or _is_language_token(token)]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in added if details.added.get(token) in special]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in added if details.added.get(token) not in special]
    )
    end = tokens[details.eos or 0]
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, details.eos or 0)]
    )
    return tokenizer


def _vocabulary_tokens(source: Path, details: TokenizerInfo) -> list[str]:
    """Return all tokens in the order of their ids.

    Raises:
        InputError: an id has no token.
    """
    ids: Mapping[str, int] = read_json_object(source / MARIAN_VOCAB_FILE) | details.added
    token_by_id = {token_id: token for token, token_id in ids.items()}
    if sorted(token_by_id) != list(range(len(ids))):
        raise InputError(
            f"{source / MARIAN_VOCAB_FILE}: its ids have gaps or duplicates; tokenizer.json requires"
            f" consecutive ids.",
            code="vocabulary-gaps",
            file=str(source / MARIAN_VOCAB_FILE),
        )
    return [token_by_id[token_id] for token_id in range(len(token_by_id))]


def _added_token_score(token: str) -> float:
    return _ALONE if len(token) == 1 else _TOGETHER * len(token)


def _is_language_token(token: str) -> bool:
    return token.startswith(">>") and token.endswith("<<")


def compare_marian_tokenizers(source: Path, folder: Path, details: TokenizerInfo) -> str | None:
    """Return the first difference between tokenizer.json in `folder` and Marian's own, or None."""
    marian, converted = MarianTokenizer(source, details), RustTokenizer(folder, details)
    texts = comparison_texts(source, details)
    expected_ids = marian.encode_batch(texts, NO_LIMIT).ids
    for text, expected, actual_ids in zip(
        texts, expected_ids, converted.encode_batch(texts, NO_LIMIT).ids, strict=True
    ):
        if expected != actual_ids:
            return f"ids of {text[:60]!r}: {actual_ids[:12]} instead of {expected[:12]}"
    for row, original, decoded_text in zip(
        expected_ids, marian.decode_batch(expected_ids), converted.decode_batch(expected_ids), strict=True
    ):
        if original != decoded_text:
            return f"the text of {row[:12]}: {decoded_text[:60]!r} instead of {original[:60]!r}"
    return None


def comparison_texts(source: Path, details: TokenizerInfo, count: int = COMPARED_TEXTS) -> list[str]:
    """Return `count` texts that the two are compared on, the same ones each time for a vocabulary."""
    tokens = _vocabulary_tokens(source, details)
    plain_tokens = [w for w in tokens if w not in details.added and not _is_language_token(w)]
    known_characters = {
        character
        for p in _read_sentencepiece(source / SENTENCEPIECE_FILE).pieces
        if p.type == _NORMAL_PIECE
        for character in p.piece
    }
    single_characters = {token for token in tokens if len(token) == 1} - known_characters
    generator = random.Random(0)
    texts = [t for t in EDGE_CASE_TEXTS if not t.startswith(">>")]
    texts += [f"{w} {generator.choice(plain_tokens)}" for w in tokens if _is_language_token(w)][:200]
    while len(texts) < count:
        text = _random_text(generator, plain_tokens, len(texts) % 4)
        if not text.lstrip().startswith(">>") and not _has_adjacent_unknown(
            text, known_characters, single_characters
        ):
            texts.append(text)
    return texts


def _random_text(drawn: random.Random, plain: Sequence[str], kind: int) -> str:
    """Return a text: pieces joined, as title-case words, after other letters, or in capitals."""
    sampled = drawn.choices(plain, k=drawn.randint(1, 12))
    if kind == 0:
        return "".join(sampled).replace(_SPACE, " ")
    if kind == 1:
        return " ".join(token.strip(_SPACE) for token in sampled).title()
    if kind == 2:
        low, high = drawn.choice(_BLOCKS)
        characters = "".join(chr(drawn.randint(low, high - 1)) for _ in range(drawn.randint(1, 6)))
        return f"{_strip_combining_marks(characters)} {sampled[0].strip(_SPACE)}"
    return "".join(sampled[:3]).replace(_SPACE, " ").upper() + drawn.choice(".,!?;: \n\t")


def _has_adjacent_unknown(text: str, known: Set[str], alone: Set[str]) -> bool:
    """Return whether two adjacent characters are unknown to the source, and the target knows one of them."""
    normalized = unicodedata.normalize("NFKC", text)
    unknown_characters = {
        character for character in normalized if character not in known and not character.isspace()
    }
    return any(
        {a, b} <= unknown_characters and not alone.isdisjoint((a, b))
        for a, b in itertools.pairwise(normalized)
    )


def _strip_combining_marks(text: str) -> str:
    """Return `text` without combining marks after characters that NFKC changes."""
    result = ""
    for character in text:
        previous = result[-1:]
        if unicodedata.category(character)[0] != "M" or unicodedata.normalize("NFKC", previous) == previous:
            result += character
    return result


def _read_sentencepiece(path: Path) -> Any:
    """Return the ModelProto of a SentencePiece file.

    Raises:
        InputError: it cannot be read.
    """
    protobuf: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protobuf.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf raises several classes for the same error
        raise InputError(
            f"{path}: the SentencePiece model cannot be read: {error}", code="damaged-file", file=str(path)
        ) from error
    return proto
