"""The vocabulary in a tokenizer.json (tokenizers library): WordPiece, BPE, Unigram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.compress.vocabulary.pieces import by_merges, is_byte, single_pieces, single_wordpieces, steps_to
from smelt.compress.vocabulary.words import Words
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
# What other readers find the same vocabulary in; a trimmed one is written as tokenizer.json alone.
_OTHERS = (
    "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
    "added_tokens.json",
)  # fmt: skip


def words_of_json(data: dict[str, Any], where: str) -> Words:
    """Return the words of the tokenizer.json `data`; `where` names it in messages.

    Raises:
        InputError: one that cannot be trimmed safely.
    """
    model = data.get("model") or {}
    kind = str(model.get("type"))
    marks = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if kind not in ("WordPiece", "BPE", "Unigram") or (kind == "BPE" and marks):
        what = f"{kind} with {' and '.join(marks)}" if kind == "BPE" else kind
        raise InputError(
            f"trim-vocabulary: {where} holds a tokenizer of the kind {what}, which cannot be trimmed so"
            f" that texts"
            " stay as they are. Those that can: WordPiece, BPE, Unigram, and Marian's pair of SentencePiece"
            " models.",
            code="unsupported-tokenizer",
        )
    ids = _ids(model, kind)
    added = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or ()}
    stay = {ids[token] for token in _stay(model, kind, ids)} | set(added.values())
    if kind == "Unigram":
        stay |= set(range(len(model["vocab"]))) - set(ids.values())  # a piece that stands there twice
        stay |= {int(model["unk_id"])} if model.get("unk_id") is not None else set()
    if model.get("unk_token") in ids:
        stay.add(ids[model["unk_token"]])
    rank = by_merges(_pair(merge) for merge in model.get("merges") or ())
    names = {number: token for token, number in ids.items()}

    def parts(number: int) -> frozenset[int]:
        if kind != "BPE" or number not in names:
            return frozenset()
        return frozenset(ids[step] for step in steps_to(names[number], rank) if step in ids)

    def write(folder: Path, new: Mapping[int, int]) -> None:
        write_json(folder / FILE, trimmed(data, new))
        if (folder / CONFIG).is_file():
            write_json(folder / CONFIG, renumbered(read_json(folder / CONFIG), new))
        for name in _OTHERS:
            (folder / name).unlink(missing_ok=True)

    return Words(kind, {**ids, **added}, frozenset(stay), parts, write)


def trimmed(data: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return the tokenizer.json `data` with the tokens of `new` alone, under their new numbers."""
    model = dict(data["model"])
    kind = str(model["type"])
    if kind == "Unigram":
        model["vocab"] = [entry for at, entry in enumerate(model["vocab"]) if at in new]
        if model.get("unk_id") is not None:
            model["unk_id"] = new[model["unk_id"]]
    else:
        model["vocab"] = {token: new[at] for token, at in model["vocab"].items() if at in new}
    if kind == "BPE":
        left = model["vocab"]
        pairs = ((merge, _pair(merge)) for merge in model["merges"])
        model["merges"] = [m for m, (a, b) in pairs if a in left and b in left and a + b in left]
    added = [{**token, "id": new[token["id"]]} for token in data.get("added_tokens") or ()]
    result = {**data, "model": model, "added_tokens": added}
    if isinstance(data.get("padding"), dict):
        pad = data["padding"].get("pad_id")
        result["padding"] = {**data["padding"], "pad_id": new.get(pad, pad)}
    if data.get("post_processor"):
        result["post_processor"] = _around(data["post_processor"], new)
    return result


def renumbered(config: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return a tokenizer_config.json whose added tokens have their new numbers."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        return config
    found = {str(new[int(at)]): token for at, token in added.items() if int(at) in new}
    return {**config, "added_tokens_decoder": found}


def _ids(model: dict[str, Any], kind: str) -> dict[str, int]:
    vocab = model["vocab"]
    if kind == "Unigram":
        return {str(entry[0]): at for at, entry in enumerate(vocab)}
    return {str(token): int(at) for token, at in vocab.items()}


def _stay(model: dict[str, Any], kind: str, ids: Mapping[str, int]) -> set[str]:
    if kind == "WordPiece":
        return single_wordpieces(ids, str(model.get("continuing_subword_prefix") or ""))
    if kind == "Unigram":
        return single_pieces(ids, {str(token): float(score) for token, score in model["vocab"]})
    # BPE begins with characters, so that whatever is joined from them can be said without it
    return {token for token in ids if len(token) == 1 or is_byte(token)}


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two sides of a merge, which is stored as a pair, or as text with a blank between them."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return str(first), str(second)


def _around(processor: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return what puts special tokens around texts, with their new numbers."""
    result = dict(processor)
    if isinstance(result.get("processors"), list):
        result["processors"] = [_around(one, new) for one in result["processors"]]
    for name in ("sep", "cls"):  # BertProcessing, RobertaProcessing: token and number
        if isinstance(result.get(name), list):
            result[name] = [result[name][0], new[result[name][1]]]
    if isinstance(result.get("special_tokens"), dict):  # TemplateProcessing
        result["special_tokens"] = {
            name: {**token, "ids": [new[at] for at in token["ids"]]}
            for name, token in result["special_tokens"].items()
        }
    return result
