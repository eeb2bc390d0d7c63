"""The vocabulary of Marian's tokenizer: two SentencePiece models, and vocab.json with the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from smelt.compress.vocabulary.pieces import by_scores, single_pieces, steps_to
from smelt.compress.vocabulary.tokenizer_json import CONFIG, renumbered
from smelt.compress.vocabulary.words import Words
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json

MODELS, WORDS, TARGET_WORDS = ("source.spm", "target.spm"), "vocab.json", "target_vocab.json"
# sentencepiece_model.proto: kinds of models and of pieces
_UNIGRAM, _BPE, _NORMAL = 1, 2, 1


def words_of_marian(folder: Path) -> Words:
    """Return the words of the Marian tokenizer in `folder`.

    Raises:
        InputError: its files are damaged, or of a kind that cannot be trimmed.
    """
    if (folder / TARGET_WORDS).is_file():
        raise InputError(
            f"trim-vocabulary: {folder} has one vocabulary for the source and another for the target"
            f" ({TARGET_WORDS}); only a shared one can be trimmed by this version.",
            code="unsupported-tokenizer",
        )
    ids = {str(token): int(at) for token, at in read_json(folder / WORDS).items()}
    protos = {name: _read(folder / name) for name in MODELS}
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    normal = {p.piece for proto in protos.values() for p in proto.pieces if p.type == _NORMAL}
    # what no model cuts out are special tokens and languages; added ones are found before any model
    stay = {at for token, at in ids.items() if token not in normal}
    stay |= {int(at) for at in config.get("added_tokens_decoder") or ()}
    for proto in protos.values():
        scores = {p.piece: p.score for p in proto.pieces if p.type == _NORMAL}
        needed = single_pieces(scores, scores if proto.trainer_spec.model_type == _UNIGRAM else None)
        stay |= {ids[token] for token in needed if token in ids}
    ranks = [_rank(proto) for proto in protos.values() if proto.trainer_spec.model_type == _BPE]
    names = {number: token for token, number in ids.items()}

    def parts(number: int) -> frozenset[int]:
        steps = (step for rank in ranks for step in steps_to(names.get(number, ""), rank))
        return frozenset(ids[step] for step in steps if step in ids)

    def write(out: Path, new: Mapping[int, int]) -> None:
        gone = {token for token, at in ids.items() if at not in new}
        for name, proto in protos.items():
            (out / name).write_bytes(_without(proto, gone))
        write_json(out / WORDS, {token: new[at] for token, at in ids.items() if at in new})
        if config:
            write_json(out / CONFIG, renumbered(config, new))

    return Words("SentencePiece pair", ids, frozenset(stay), parts, write)


def _rank(proto: Any) -> Any:
    return by_scores({p.piece: p.score for p in proto.pieces if p.type == _NORMAL})


def _without(proto: Any, gone: Iterable[str]) -> bytes:
    """Return the model without its pieces `gone`, as a file holds it."""
    gone, left = set(gone), type(proto)()
    left.CopyFrom(proto)
    del left.pieces[:]
    left.pieces.extend(p for p in proto.pieces if p.type != _NORMAL or p.piece not in gone)
    left.trainer_spec.vocab_size = len(left.pieces)
    found: bytes = left.SerializeToString()
    return found


def _read(path: Path) -> Any:
    # imported by its name, because it comes without types
    protobuf: Any = import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protobuf.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf raises several kinds, all meaning the same
        raise InputError(
            f"{path}: the SentencePiece model cannot be read: {error}", code="damaged-file", file=str(path)
        ) from error
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        raise InputError(
            f"trim-vocabulary: {path} is a SentencePiece model of words or characters, which cannot be"
            f" trimmed so"
            " that texts stay as they are; unigram and bpe can.",
            code="unsupported-tokenizer",
        )
    return proto
