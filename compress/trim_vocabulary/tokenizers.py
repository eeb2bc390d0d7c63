"""Trim the vocabulary in a tokenizer's files: tokenizer.json (WordPiece, BPE, Unigram), or Marian's.

Texts whose tokens are all kept must be tokenized as before, and no text may get new unknown tokens. Which
other tokens that requires depends on the algorithm:

- WordPiece takes the longest match, Unigram the likeliest segmentation: removing others changes neither.
- BPE merges neighbors, so the intermediate merges of a kept token are kept.
- In each, single characters (bytes, in byte-level models) are kept, and tokens that they cannot spell.

Marian's tokenizer has two SentencePiece models, and vocab.json with the ids. A model's other file with token
ids, its shortlist, is trimmed too. Tokens are strings here, as the tokenizer stores them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smelt.compress.trim_vocabulary.select_tokens import (
    TokenCounts,
    TrimmableVocabulary,
    TrimVocabularySettings,
    config_token_ids,
    select_tokens,
)
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json

# The rank of a pair of neighbors (the smallest is merged first), None if they are not merged.
MergeRank = Callable[[str, str], float | None]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def is_byte_token(token: str) -> bool:
    """Return whether `token` is a byte-fallback token."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def apply_bpe(text: str, rank: MergeRank) -> tuple[list[str], set[str]]:
    """Tokenize `text` by BPE: merge the neighbors of the smallest rank, from the left, until none is left.

    Returns:
        The pieces, and all intermediate pieces. Source: Sennrich et al. 2016, arXiv:1508.07909.
    """
    pieces, produced = list(text), set(text)
    while len(pieces) > 1:
        ranks = [rank(a, b) for a, b in pairwise(pieces)]
        mergeable = [(value, index) for index, value in enumerate(ranks) if value is not None]
        if not mergeable:
            break
        _, index = min(mergeable)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
        produced.add(pieces[index])
    return pieces, produced


def merge_ancestors(token: str, rank: MergeRank) -> frozenset[str]:
    """Return the tokens that BPE merges into `token`; empty if it is not merged.

    Within a text a token is merged as in isolation: if a neighbor outside had been merged with a part of
    it, the token would not occur.
    """
    pieces, produced = apply_bpe(token, rank)
    return frozenset(produced - {token}) if pieces == [token] else frozenset()


def rank_by_merges(merges: Iterable[tuple[str, str]]) -> MergeRank:
    """Return the rank function of a list of merges: the position in the list."""
    positions: dict[tuple[str, str], float] = {}
    for index, pair in enumerate(merges):
        positions.setdefault(pair, index)
    return lambda a, b: positions.get((a, b))


def rank_by_scores(scores: Mapping[str, float]) -> MergeRank:
    """Return the rank function of SentencePiece's BPE: by the score of the merged piece, highest first."""

    def rank(a: str, b: str) -> float | None:
        score = scores.get(a + b)
        return None if score is None else -score

    return rank


def required_pieces(tokens: Collection[str], scores: Mapping[str, float] | None = None) -> set[str]:
    """Return the pieces to keep of a model without continuation marks: characters, bytes, what they lack.

    Args:
        tokens: all of them.
        scores: of Unigram; unknown costs a little more than the rarest piece, so that piece is kept too.
    """
    characters = {token for token in tokens if len(token) == 1 or is_byte_token(token)}
    bytes_too = sum(map(is_byte_token, tokens)) == 256
    required = characters | {t for t in tokens if not bytes_too and not characters.issuperset(t)}
    if scores:
        required.add(min(scores, key=lambda token: scores[token]))
    return required


def required_wordpieces(tokens: Collection[str], mark: str) -> set[str]:
    """Return the WordPiece tokens to keep; continuation tokens begin with `mark` (##)."""
    vocabulary = set(tokens)

    def characters(token: str) -> list[str]:
        is_continuation = bool(mark) and token.startswith(mark) and len(token) > len(mark)
        letters = list(token.removeprefix(mark) if is_continuation else token)
        return [mark + c if is_continuation or index else c for index, c in enumerate(letters)]

    return {
        token
        for token in vocabulary
        if len(parts := characters(token)) == 1 or not vocabulary.issuperset(parts)
    }


TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Other files with the same vocabulary; a trimmed one is written to tokenizer.json only.
_OTHER_TOKENIZER_FILES = (
    "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
    "added_tokens.json",
)  # fmt: skip


def open_json_vocabulary(data: dict[str, Any], location: str) -> TrimmableVocabulary:
    """Return the vocabulary of the tokenizer.json `data`; `location` names it in messages.

    Raises:
        InputError: the tokenizer cannot be trimmed safely.
    """
    model = data.get("model") or {}
    kind = str(model.get("type"))
    marks = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if kind not in ("WordPiece", "BPE", "Unigram") or (kind == "BPE" and marks):
        description = f"{kind} with {' and '.join(marks)}" if kind == "BPE" else kind
        raise InputError(
            f"trim-vocabulary: {location} contains a tokenizer of type {description}, which cannot be trimmed"
            " without changing how texts are tokenized. Supported: WordPiece, BPE, Unigram, and"
            " Marian's two SentencePiece models. Remove the stage.",
            code="unsupported-tokenizer",
        )
    ids = _token_ids(model, kind)
    added_ids = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or ()}
    required = {ids[token] for token in _required_tokens(model, kind, ids)} | set(added_ids.values())
    if kind == "Unigram":
        required |= set(range(len(model["vocab"]))) - set(ids.values())  # a duplicate piece
        required |= {int(model["unk_id"])} if model.get("unk_id") is not None else set()
    if model.get("unk_token") in ids:
        required.add(ids[model["unk_token"]])
    rank = rank_by_merges(_merge_pair(merge) for merge in model.get("merges") or ())
    names = {token_id: token for token, token_id in ids.items()}

    def parts(number: int) -> frozenset[int]:
        if kind != "BPE" or number not in names:
            return frozenset()
        return frozenset(ids[step] for step in merge_ancestors(names[number], rank) if step in ids)

    def write(folder: Path, new: Mapping[int, int]) -> None:
        write_json(folder / TOKENIZER_FILE, trim_tokenizer_json(data, new))
        if (folder / TOKENIZER_CONFIG_FILE).is_file():
            write_json(
                folder / TOKENIZER_CONFIG_FILE,
                renumber_tokenizer_config(read_json_object(folder / TOKENIZER_CONFIG_FILE), new),
            )
        for name in _OTHER_TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)

    return TrimmableVocabulary(kind, {**ids, **added_ids}, frozenset(required), parts, write)


def trim_tokenizer_json(data: dict[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return the tokenizer.json `data` with the tokens in `new_ids` only, under their new ids."""
    model = dict(data["model"])
    kind = str(model["type"])
    if kind == "Unigram":
        model["vocab"] = [entry for token_id, entry in enumerate(model["vocab"]) if token_id in new_ids]
        if model.get("unk_id") is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        model["vocab"] = {
            token: new_ids[token_id] for token, token_id in model["vocab"].items() if token_id in new_ids
        }
    if kind == "BPE":
        vocabulary = model["vocab"]
        pairs = ((merge, _merge_pair(merge)) for merge in model["merges"])
        model["merges"] = [
            m for m, (a, b) in pairs if a in vocabulary and b in vocabulary and a + b in vocabulary
        ]
    added_tokens = [{**token, "id": new_ids[token["id"]]} for token in data.get("added_tokens") or ()]
    result = {**data, "model": model, "added_tokens": added_tokens}
    if isinstance(data.get("padding"), dict):
        pad = data["padding"].get("pad_id")
        result["padding"] = {**data["padding"], "pad_id": new_ids.get(pad, pad)}
    if data.get("post_processor"):
        result["post_processor"] = _renumber_post_processor(data["post_processor"], new_ids)
    return result


def renumber_tokenizer_config(config: dict[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return a tokenizer_config.json whose added tokens have their new ids."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        return config
    renumbered = {
        str(new_ids[int(token_id)]): token for token_id, token in added.items() if int(token_id) in new_ids
    }
    return {**config, "added_tokens_decoder": renumbered}


def _token_ids(model: dict[str, Any], kind: str) -> dict[str, int]:
    vocab = model["vocab"]
    if kind == "Unigram":
        return {str(entry[0]): token_id for token_id, entry in enumerate(vocab)}
    return {str(token): int(token_id) for token, token_id in vocab.items()}


def _required_tokens(model: dict[str, Any], kind: str, ids: Mapping[str, int]) -> set[str]:
    if kind == "WordPiece":
        return required_wordpieces(ids, str(model.get("continuing_subword_prefix") or ""))
    if kind == "Unigram":
        return required_pieces(ids, {str(token): float(score) for token, score in model["vocab"]})
    # BPE starts from characters, so every merged token can be spelled with them
    return {token for token in ids if len(token) == 1 or is_byte_token(token)}


def _merge_pair(merge: Any) -> tuple[str, str]:
    """Return the two sides of a merge, which is stored as a pair, or as text with a blank between them."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return str(first), str(second)


def _renumber_post_processor(processor: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return the post-processor, which adds special tokens, with their new ids."""
    result = dict(processor)
    if isinstance(result.get("processors"), list):
        result["processors"] = [
            _renumber_post_processor(processor, new) for processor in result["processors"]
        ]
    for name in ("sep", "cls"):  # BertProcessing, RobertaProcessing: token and id
        if isinstance(result.get(name), list):
            result[name] = [result[name][0], new[result[name][1]]]
    if isinstance(result.get("special_tokens"), dict):  # TemplateProcessing
        result["special_tokens"] = {
            name: {**token, "ids": [new[token_id] for token_id in token["ids"]]}
            for name, token in result["special_tokens"].items()
        }
    return result


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
    ids = {str(token): int(token_id) for token, token_id in read_json_object(folder / VOCAB_FILE).items()}
    protos = {name: _read_model(folder / name) for name in SENTENCEPIECE_FILES}
    config = (
        read_json_object(folder / TOKENIZER_CONFIG_FILE) if (folder / TOKENIZER_CONFIG_FILE).is_file() else {}
    )
    normal = {p.piece for proto in protos.values() for p in proto.pieces if p.type == _NORMAL}
    # tokens outside of both models are special tokens and languages; added tokens are split off before
    required = {token_id for token, token_id in ids.items() if token not in normal}
    required |= {int(token_id) for token_id in config.get("added_tokens_decoder") or ()}
    for proto in protos.values():
        scores = {p.piece: p.score for p in proto.pieces if p.type == _NORMAL}
        pieces = required_pieces(scores, scores if proto.trainer_spec.model_type == _UNIGRAM else None)
        required |= {ids[token] for token in pieces if token in ids}
    ranks = [_piece_rank(proto) for proto in protos.values() if proto.trainer_spec.model_type == _BPE]
    names = {number: token for token, number in ids.items()}

    def parts(number: int) -> frozenset[int]:
        steps = (step for rank in ranks for step in merge_ancestors(names.get(number, ""), rank))
        return frozenset(ids[step] for step in steps if step in ids)

    def write(out: Path, new: Mapping[int, int]) -> None:
        removed = {token for token, token_id in ids.items() if token_id not in new}
        for name, proto in protos.items():
            (out / name).write_bytes(_remove_pieces(proto, removed))
        write_json(
            out / VOCAB_FILE, {token: new[token_id] for token, token_id in ids.items() if token_id in new}
        )
        if config:
            write_json(out / TOKENIZER_CONFIG_FILE, renumber_tokenizer_config(config, new))

    return TrimmableVocabulary("SentencePiece pair", ids, frozenset(required), parts, write)


def _piece_rank(proto: Any) -> Any:
    return rank_by_scores({p.piece: p.score for p in proto.pieces if p.type == _NORMAL})


def _remove_pieces(proto: Any, removed: Iterable[str]) -> bytes:
    """Return the serialized model without its pieces `removed`."""
    removed, result = set(removed), type(proto)()
    result.CopyFrom(proto)
    del result.pieces[:]
    result.pieces.extend(p for p in proto.pieces if p.type != _NORMAL or p.piece not in removed)
    result.trainer_spec.vocab_size = len(result.pieces)
    serialized: bytes = result.SerializeToString()
    return serialized


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


def open_vocabulary(folder: Path, config: Any) -> TrimmableVocabulary:
    """Return the vocabulary of the tokenizer in `folder`, of the model with this config.

    Raises:
        InputError: the tokenizer cannot be trimmed, or has more tokens than the model.
    """
    vocabulary = _open_tokenizer_vocabulary(folder)
    max_id = max(vocabulary.ids.values())
    if max_id >= config.vocab_size:
        raise InputError(
            f"trim-vocabulary: the tokenizer in {folder} has a token with id {max_id}, but the model has"
            f" {config.vocab_size} tokens. Use the tokenizer that belongs to the model.",
            code="vocabulary-mismatch",
        )
    return vocabulary


def _open_tokenizer_vocabulary(folder: Path) -> TrimmableVocabulary:
    from smelt.models.checkpoint import load_tokenizer

    if all((folder / name).is_file() for name in SENTENCEPIECE_FILES):
        return open_marian_vocabulary(folder)
    if (folder / TOKENIZER_FILE).is_file():
        return open_json_vocabulary(read_json_object(folder / TOKENIZER_FILE), f"{folder / TOKENIZER_FILE}")
    tokenizer = load_tokenizer(folder)  # made of older files (vocab.txt, merges.txt, spiece.model)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise InputError(
            f"trim-vocabulary: {folder} contains a {type(tokenizer).__name__}, which cannot be"
            " trimmed. Supported: tokenizers with a tokenizer.json (WordPiece, BPE, Unigram), and"
            " Marian's two SentencePiece models. Remove the stage.",
            code="unsupported-tokenizer",
        )
    return open_json_vocabulary(json.loads(inner.to_str()), f"{folder}")


def select_kept_tokens(
    counts: TokenCounts,
    vocabulary: TrimmableVocabulary,
    model: Any,
    tokenizer: Any,
    settings: TrimVocabularySettings,
) -> list[int]:
    """Return the ids to keep, rising: those of `select_tokens`, of configs and of the tokenizer."""
    must = set(tokenizer.all_special_ids) | config_token_ids(model.config.to_dict())
    if model.can_generate():
        must |= config_token_ids(model.generation_config.to_dict())
    return select_tokens(
        counts,
        vocabulary,
        must,
        min_count=settings.min_count or 1,
        coverage=settings.coverage,
        size=settings.size,
        multiple_of=settings.multiple_of,
    )


def trim_shortlist(folder: Path, new_ids: Mapping[int, int], kept_ids: list[int], size: int) -> None:
    """Reduce the shortlist in `folder`, if there is one, to the kept tokens.

    A removed candidate of a source token is replaced by a token that is always allowed.
    """
    from smelt.generation.config import make_shortlist, read_shortlist, write_shortlist

    shortlist = read_shortlist(folder, {"vocab_size": size})
    if shortlist is None:
        return
    always = np.array(
        [new_ids[token_id] for token_id in shortlist.always.tolist() if token_id in new_ids], dtype=np.int64
    )
    new_by_old = np.full(size, always[0], dtype=np.int64)
    new_by_old[kept_ids] = np.arange(len(kept_ids))
    write_shortlist(make_shortlist(new_by_old[shortlist.table[kept_ids]], always, len(kept_ids)), folder)
