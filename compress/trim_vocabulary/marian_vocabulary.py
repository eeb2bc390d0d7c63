"""The vocabulary of Marian's tokenizer: two SentencePiece models, and vocab.json with the ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from smelt.compress.trim_vocabulary.subwords import merge_ancestors, rank_by_scores, required_pieces
from smelt.compress.trim_vocabulary.tokenizer_json import TOKENIZER_CONFIG_FILE, renumber_tokenizer_config
from smelt.compress.trim_vocabulary.vocabulary import TrimmableVocabulary
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json

SENTENCEPIECE_FILES, VOCAB_FILE, TARGET_VOCAB_FILE = (
    ("source.spm", "target.spm"),
    "vocab.json",
    "target_vocab.json",
)
# sentencepiece_model.proto: kinds of models and of pieces
_UNIGRAM, _BPE, _NORMAL = 1, 2, 1


def open_marian_vocabulary(folder: Path) -> TrimmableVocabulary:
    """Return the vocabulary of the Marian tokenizer in `folder`.

    Raises:
        InputError: its files are damaged, or of a kind that cannot be trimmed.
    """
    if (folder / TARGET_VOCAB_FILE).is_file():
        raise InputError(
            f"trim-vocabulary: {folder} has separate source and target vocabularies"
            f" ({TARGET_VOCAB_FILE}); only a shared vocabulary can be trimmed. Remove the stage.",
            code="unsupported-tokenizer",
        )
    ids = {str(token): int(at) for token, at in read_json_object(folder / VOCAB_FILE).items()}
    protos = {name: _read_model(folder / name) for name in SENTENCEPIECE_FILES}
    config = (
        read_json_object(folder / TOKENIZER_CONFIG_FILE) if (folder / TOKENIZER_CONFIG_FILE).is_file() else {}
    )
    normal = {p.piece for proto in protos.values() for p in proto.pieces if p.type == _NORMAL}
    # tokens outside of both models are special tokens and languages; added tokens are split off before
    stay = {at for token, at in ids.items() if token not in normal}
    stay |= {int(at) for at in config.get("added_tokens_decoder") or ()}
    for proto in protos.values():
        scores = {p.piece: p.score for p in proto.pieces if p.type == _NORMAL}
        needed = required_pieces(scores, scores if proto.trainer_spec.model_type == _UNIGRAM else None)
        stay |= {ids[token] for token in needed if token in ids}
    ranks = [_piece_rank(proto) for proto in protos.values() if proto.trainer_spec.model_type == _BPE]
    names = {number: token for token, number in ids.items()}

    def parts(number: int) -> frozenset[int]:
        steps = (step for rank in ranks for step in merge_ancestors(names.get(number, ""), rank))
        return frozenset(ids[step] for step in steps if step in ids)

    def write(out: Path, new: Mapping[int, int]) -> None:
        gone = {token for token, at in ids.items() if at not in new}
        for name, proto in protos.items():
            (out / name).write_bytes(_remove_pieces(proto, gone))
        write_json(out / VOCAB_FILE, {token: new[at] for token, at in ids.items() if at in new})
        if config:
            write_json(out / TOKENIZER_CONFIG_FILE, renumber_tokenizer_config(config, new))

    return TrimmableVocabulary("SentencePiece pair", ids, frozenset(stay), parts, write)


def _piece_rank(proto: Any) -> Any:
    return rank_by_scores({p.piece: p.score for p in proto.pieces if p.type == _NORMAL})


def _remove_pieces(proto: Any, gone: Iterable[str]) -> bytes:
    """Return the serialized model without its pieces `gone`."""
    gone, left = set(gone), type(proto)()
    left.CopyFrom(proto)
    del left.pieces[:]
    left.pieces.extend(p for p in proto.pieces if p.type != _NORMAL or p.piece not in gone)
    left.trainer_spec.vocab_size = len(left.pieces)
    found: bytes = left.SerializeToString()
    return found


def _read_model(path: Path) -> Any:
    # imported by its name, because it has no type annotations
    protobuf: Any = import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protobuf.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf raises several types of errors for the same fault
        raise InputError(
            f"{path}: the SentencePiece model cannot be read: {error}", code="damaged-file", file=str(path)
        ) from error
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        raise InputError(
            f"trim-vocabulary: {path} is a SentencePiece model of words or characters, which cannot be"
            " trimmed without changing how texts are tokenized. Supported: Unigram and BPE."
            " Remove the stage.",
            code="unsupported-tokenizer",
        )
    return proto
