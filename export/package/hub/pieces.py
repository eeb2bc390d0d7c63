"""Marian's tokenizer as a tokenizer.json: its SentencePiece model as a Unigram, its ids those of vocab.json.

Only what says the same on 10,000 texts is written. The texts are made by rule: pieces of the vocabulary put
together, with and without blanks, characters of Unicode's blocks, awkward texts. What begins with `>>` and is
no language of the model is not among them: Marian takes `>>...<<` for one unknown token, a Unigram reads it.

Source: transformers' convert_slow_tokenizer.py (5.23), `SpmConverter`; sentencepiece's unigram_model.cc.
"""

from __future__ import annotations

import importlib
import itertools
import random
import unicodedata
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.export.tokenizer.awkward_texts import AWKWARD
from smelt.runtime.text.limits import NO_LIMIT
from smelt.runtime.text.marian_tokenizer import PIECES, WORDS, MarianTokenizer
from smelt.runtime.text.rust_tokenizer import FILE, RustTokenizer
from smelt.runtime.text.tokenizing_file import Tokenizing, read_tokenizing

TEXTS = 10_000
_UNIGRAM = 1  # sentencepiece_model.proto, TrainerSpec.ModelType
_NORMAL = 1  # ... SentencePiece.Type
# Below every sum of scores of a text's pieces: a word of the target alone, one character and several. Of one
# character SentencePiece knows nothing either, and vocab.json gives its id.
_ALONE, _TOGETHER = -1000.0, -1500.0
_SPACE = "\u2581"
_BLOCKS = ((0x20, 0x7F), (0xA0, 0x250), (0x250, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x1E00, 0x2100),
           (0x2100, 0x2800), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFFFD),
           (0x1F300, 0x1F650))  # fmt: skip


def write_unigram(source: Path, folder: Path) -> None:
    """Write tokenizer.json of the Marian model in `source` into `folder`.

    Raises:
        InputError: its SentencePiece model is none of unigrams, or what is written would read otherwise.
    """
    details = read_tokenizing(source)
    _unigram(source, details).save(str(folder / FILE))
    problem = find_difference(source, folder, details)
    if problem is not None:
        (folder / FILE).unlink()
        raise InputError(
            f"{source / PIECES}: as a tokenizer.json it says something else: {problem}.",
            code="tokenizer-differs",
            file=str(source / PIECES),
        )


def _unigram(source: Path, details: Tokenizing) -> Any:
    """Return the tokenizers.Tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    proto = _read(source / PIECES)
    if proto.trainer_spec.model_type != _UNIGRAM or proto.trainer_spec.byte_fallback:
        raise InputError(
            f"{source / PIECES}: not a SentencePiece model of unigrams without bytes, which tokenizer.json"
            " could hold.",
            code="unsupported-tokenizer",
            file=str(source / PIECES),
        )
    words = _words(source, details)
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    vocabulary = [(word, scores.get(word, _low(word))) for word in words]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=details.unknown))
    chars = proto.normalizer_spec.precompiled_charsmap
    steps: list[Any] = [normalizers.Precompiled(chars)] if chars else []
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    joined = decoders.Metaspace(prepend_scheme="always", split=False)
    # not decoders.Strip, which panics where a text is empty
    ends = decoders.Replace(Regex("^ +| +$"), "")
    made.decoder = decoders.Sequence([joined, decoders.Fuse(), ends])
    special = set(details.special)
    added = [word for word in words if word in details.added or _is_language(word)]
    made.add_special_tokens(
        [AddedToken(word, normalized=False) for word in added if details.added.get(word) in special]
    )
    made.add_tokens(
        [AddedToken(word, normalized=False) for word in added if details.added.get(word) not in special]
    )
    end = words[details.eos or 0]
    made.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, details.eos or 0)])
    return made


def _words(source: Path, details: Tokenizing) -> list[str]:
    """Return all words by their ids.

    Raises:
        InputError: an id has no word.
    """
    ids: Mapping[str, int] = read_json(source / WORDS) | details.added
    words = {place: word for word, place in ids.items()}
    if sorted(words) != list(range(len(ids))):
        raise InputError(
            f"{source / WORDS}: its ids have gaps or come twice; tokenizer.json numbers all words.",
            code="vocabulary-gaps",
            file=str(source / WORDS),
        )
    return [words[place] for place in range(len(words))]


def _low(word: str) -> float:
    return _ALONE if len(word) == 1 else _TOGETHER * len(word)


def _is_language(word: str) -> bool:
    return word.startswith(">>") and word.endswith("<<")


def find_difference(source: Path, folder: Path, details: Tokenizing) -> str | None:
    """Return what tokenizer.json in `folder` reads otherwise than Marian's own, in words; None: nothing."""
    own, made = MarianTokenizer(source, details), RustTokenizer(folder, details)
    texts = texts_of(source, details)
    wanted = own.encode_rows(texts, NO_LIMIT).ids
    for text, expected, found in zip(texts, wanted, made.encode_rows(texts, NO_LIMIT).ids, strict=True):
        if expected != found:
            return f"ids of {text[:60]!r}: {found[:12]}, not {expected[:12]}"
    for row, said, read in zip(wanted, own.decode_rows(wanted), made.decode_rows(wanted), strict=True):
        if said != read:
            return f"the text of {row[:12]}: {read[:60]!r}, not {said[:60]!r}"
    return None


def texts_of(source: Path, details: Tokenizing, count: int = TEXTS) -> list[str]:
    """Return `count` texts that the two are compared on: always the same ones for a vocabulary."""
    words = _words(source, details)
    plain = [w for w in words if w not in details.added and not _is_language(w)]
    known = {letter for p in _read(source / PIECES).pieces if p.type == _NORMAL for letter in p.piece}
    alone = {word for word in words if len(word) == 1} - known
    drawn = random.Random(0)
    texts = [t for t in AWKWARD if not t.startswith(">>")]
    texts += [f"{w} {drawn.choice(plain)}" for w in words if _is_language(w)][:200]
    while len(texts) < count:
        text = _drawn(drawn, plain, len(texts) % 4)
        if not text.lstrip().startswith(">>") and not _side_by_side(text, known, alone):
            texts.append(text)
    return texts


def _drawn(drawn: random.Random, plain: Sequence[str], kind: int) -> str:
    """Return a text: pieces as they are, as words with large letters, after other letters, or in capitals."""
    pieces = drawn.choices(plain, k=drawn.randint(1, 12))
    if kind == 0:
        return "".join(pieces).replace(_SPACE, " ")
    if kind == 1:
        return " ".join(piece.strip(_SPACE) for piece in pieces).title()
    if kind == 2:
        low, high = drawn.choice(_BLOCKS)
        letters = "".join(chr(drawn.randint(low, high - 1)) for _ in range(drawn.randint(1, 6)))
        return f"{_without_loose_accents(letters)} {pieces[0].strip(_SPACE)}"
    return "".join(pieces[:3]).replace(_SPACE, " ").upper() + drawn.choice(".,!?;: \n\t")


def _side_by_side(text: str, known: Set[str], alone: Set[str]) -> bool:
    """Say whether two characters meet that the source does not know, and the target knows one of."""
    letters = unicodedata.normalize("NFKC", text)
    strange = {letter for letter in letters if letter not in known and not letter.isspace()}
    return any({a, b} <= strange and not alone.isdisjoint((a, b)) for a, b in itertools.pairwise(letters))


def _without_loose_accents(text: str) -> str:
    """Return `text` without marks behind characters that NFKC changes."""
    kept = ""
    for letter in text:
        before = kept[-1:]
        if unicodedata.category(letter)[0] != "M" or unicodedata.normalize("NFKC", before) == before:
            kept += letter
    return kept


def _read(path: Path) -> Any:
    """Return the ModelProto of a SentencePiece file.

    Raises:
        InputError: it cannot be read.
    """
    protobuf: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protobuf.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf raises several kinds, all meaning the same
        raise InputError(
            f"{path}: the SentencePiece model cannot be read: {error}", code="damaged-file", file=str(path)
        ) from error
    return proto
