"""The vocabulary in a tokenizer.json (tokenizers library): WordPiece, BPE, Unigram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.compress.trim_vocabulary.subwords import (
    is_byte_token,
    merge_ancestors,
    rank_by_merges,
    required_pieces,
    required_wordpieces,
)
from smelt.compress.trim_vocabulary.vocabulary import TrimmableVocabulary
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json

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
        what = f"{kind} with {' and '.join(marks)}" if kind == "BPE" else kind
        raise InputError(
            f"trim-vocabulary: {location} contains a tokenizer of type {what}, which cannot be trimmed"
            " without changing how texts are tokenized. Supported: WordPiece, BPE, Unigram, and"
            " Marian's two SentencePiece models. Remove the stage.",
            code="unsupported-tokenizer",
        )
    ids = _token_ids(model, kind)
    added = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or ()}
    stay = {ids[token] for token in _required_tokens(model, kind, ids)} | set(added.values())
    if kind == "Unigram":
        stay |= set(range(len(model["vocab"]))) - set(ids.values())  # a duplicate piece
        stay |= {int(model["unk_id"])} if model.get("unk_id") is not None else set()
    if model.get("unk_token") in ids:
        stay.add(ids[model["unk_token"]])
    rank = rank_by_merges(_merge_pair(merge) for merge in model.get("merges") or ())
    names = {number: token for token, number in ids.items()}

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

    return TrimmableVocabulary(kind, {**ids, **added}, frozenset(stay), parts, write)


def trim_tokenizer_json(data: dict[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return the tokenizer.json `data` with the tokens in `new_ids` only, under their new ids."""
    model = dict(data["model"])
    kind = str(model["type"])
    if kind == "Unigram":
        model["vocab"] = [entry for at, entry in enumerate(model["vocab"]) if at in new_ids]
        if model.get("unk_id") is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        model["vocab"] = {token: new_ids[at] for token, at in model["vocab"].items() if at in new_ids}
    if kind == "BPE":
        left = model["vocab"]
        pairs = ((merge, _merge_pair(merge)) for merge in model["merges"])
        model["merges"] = [m for m, (a, b) in pairs if a in left and b in left and a + b in left]
    added = [{**token, "id": new_ids[token["id"]]} for token in data.get("added_tokens") or ()]
    result = {**data, "model": model, "added_tokens": added}
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
    found = {str(new_ids[int(at)]): token for at, token in added.items() if int(at) in new_ids}
    return {**config, "added_tokens_decoder": found}


def _token_ids(model: dict[str, Any], kind: str) -> dict[str, int]:
    vocab = model["vocab"]
    if kind == "Unigram":
        return {str(entry[0]): at for at, entry in enumerate(vocab)}
    return {str(token): int(at) for token, at in vocab.items()}


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
        result["processors"] = [_renumber_post_processor(one, new) for one in result["processors"]]
    for name in ("sep", "cls"):  # BertProcessing, RobertaProcessing: token and id
        if isinstance(result.get(name), list):
            result[name] = [result[name][0], new[result[name][1]]]
    if isinstance(result.get("special_tokens"), dict):  # TemplateProcessing
        result["special_tokens"] = {
            name: {**token, "ids": [new[at] for at in token["ids"]]}
            for name, token in result["special_tokens"].items()
        }
    return result
