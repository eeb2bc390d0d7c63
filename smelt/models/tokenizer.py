"""The interface between texts and token ids, and its implementations by tokenizers and transformers.

Three classes implement `TextTokenizer`: `RustTokenizer` reads a `tokenizer.json` by the tokenizers library
only, `MarianTokenizer` uses SentencePiece, and `HubTokenizer` wraps a tokenizer of transformers, which
imports torch and is the reference of the other two. They are used where an export has verified that they
equal it (`smelt.export.tokenizer`): the onnx stage then writes `tokenizing.json` next to the tokenizer's
files, with the reader and the properties that these files do not have. `open_tokenizer` uses the lightest
reader that is verified to be exact; an artifact without that file is read by transformers. The readers'
libraries are imported when a reader is created; transformers' tokenizers import torch.

`encode_texts` tokenizes texts as a model reads them: prefix, pairs, prompts in their template, truncation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError
from smelt.core.files import load_json, read_json_object, write_json
from smelt.models.families.registry import find_family
from smelt.models.prompt_template import PromptTemplate
from smelt.models.split_words import indices_after_truncation, reads_spaces
from smelt.models.text_rules import (
    NO_LIMIT,
    read_prompt_template,
    read_text_rules,
    tokenizer_prefix,
)


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids per text, type ids where the model has them, and the number of truncated texts."""

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: int


class TextTokenizer(Protocol):
    """Texts to ids and back. Thread-safe: it does not change after its creation.

    reader: tokenizers, sentencepiece or transformers. prefix: added before every source text. lower:
    texts are lowercased first. prompts: the template of a model that answers prompts, else None.
    truncation_side: left or right. spaces_words: whether the space before a word belongs to its first token.
    model_max_length: maximum number of tokens of a row, with special tokens; huge where unknown.
    The ids are None where there is no such token.
    """

    reader: str
    prefix: str
    lower: bool
    prompts: PromptTemplate | None
    truncation_side: str
    spaces_words: bool
    model_max_length: int
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    mask_token_id: int | None

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, each with its pair, with special tokens; truncated to `max_length` tokens."""

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize `texts` without adding special tokens; those that are in a text are single tokens."""

    def encodings(self, texts: Sequence[str | list[str]], pairs: Sequence[str] | None = None) -> list[Any]:
        """Tokenize `texts`, each with its pair, with special tokens and without truncation.

        A text may be a list of its words, which are tokenized one by one.

        Returns:
            For each text an Encoding of the tokenizers library: ids, type_ids, word_ids, sequence_ids,
            offsets.

        Raises:
            InputError: the tokenizer is not one of the tokenizers library (`slow-tokenizer`).
        """

    def decode_batch(self, token_ids: Sequence[Sequence[int]], keep_special: bool = False) -> list[str]:
        """Return the text of each row of ids; with its special tokens only if `keep_special`."""


TOKENIZER_INFO_FILE = "tokenizing.json"
TokenizerReader = Literal["tokenizers", "sentencepiece", "transformers"]


class TokenizerInfo(BaseModel):
    """reader: the library. reason: why transformers is needed.

    longest: maximum number of tokens of a row. pad, bos, eos, mask: ids. types: whether rows have token
    types. clean_up: whether spaces before punctuation are removed. For sentencepiece only: added: tokens
    that are never split, with their ids; special: ids that are not shown; unknown: id of unknown tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reader: TokenizerReader
    reason: str = ""
    longest: int = NO_LIMIT
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    mask: int | None = None
    types: bool = False
    truncation_side: Literal["left", "right"] = "right"
    clean_up: bool = False
    added: dict[str, int] = Field(default_factory=dict)
    special: list[int] = Field(default_factory=list)
    unknown: int | None = None


def read_tokenizer_info(folder: Path) -> TokenizerInfo:
    """Return the tokenizer info in `folder`; that of transformers where there is none.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / TOKENIZER_INFO_FILE
    if not path.is_file():
        return TokenizerInfo(
            reader="transformers", reason=f"there is no {TOKENIZER_INFO_FILE} in this folder"
        )
    try:
        return TokenizerInfo.model_validate(load_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read this file: {error}", code="damaged-file"
        ) from error


def write_tokenizer_info(folder: Path, details: TokenizerInfo) -> None:
    """Write `details` to `folder`."""
    write_json(folder / TOKENIZER_INFO_FILE, details.model_dump(exclude_defaults=True))


TOKENIZER_FILE = "tokenizer.json"
# `clean_up_tokenization` of transformers (tokenization_utils_base.py): the replacements, in order.
CLEANUP_REPLACEMENTS = [
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
]  # fmt: skip


class RustTokenizer:
    """Reads `folder`/tokenizer.json; `details` is the tokenizer info next to it.

    The processing that transformers adds to the result of the tokenizers library, truncation by side and
    removal of spaces, is equivalent here (tokenization_utils_tokenizers.py, 5.23).
    """

    reader = "tokenizers"

    def __init__(
        self,
        folder: Path,
        details: TokenizerInfo,
        prefix: str = "",
        lower: bool = False,
        prompts: PromptTemplate | None = None,
    ) -> None:
        self.prefix, self.lower, self.prompts = prefix, lower, prompts
        self.model_max_length = details.longest
        self.pad_token_id: int | None = details.pad
        self.bos_token_id: int | None = details.bos
        self.eos_token_id: int | None = details.eos
        self.mask_token_id: int | None = details.mask
        self._facts = details
        self._path = folder / TOKENIZER_FILE
        self._inner = _open(self._path)
        self.spaces_words = reads_spaces(self._inner)
        self.truncation_side: str = details.truncation_side

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, each with its pair, with special tokens; truncated to `max_length` tokens."""
        ids, types, truncated = [], [], 0
        truncates_left = self.truncation_side == "left"
        seconds: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
        for text, second_text in zip(texts, seconds, strict=True):
            encoding = self._encode(text, second_text, True)
            row, kinds = encoding.ids, encoding.type_ids if self._facts.types else []
            if len(row) > max_length:
                truncated += 1
                kept_indices = indices_after_truncation(encoding.sequence_ids, max_length, truncates_left)
                row, kinds = (
                    [row[index] for index in kept_indices],
                    [kinds[index] for index in kept_indices if kinds],
                )
            ids.append(row)
            types.append(kinds)
        return EncodedTexts(ids, types if self._facts.types else None, truncated)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize `texts` without adding special tokens; those that are in a text are single tokens."""
        return [list(self._encode(text, None, False).ids) for text in texts]

    def encodings(self, texts: Sequence[str | list[str]], pairs: Sequence[str] | None = None) -> list[Any]:
        """Tokenize `texts`, as `TextTokenizer.encodings`."""
        seconds: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
        return [
            self._encode(text, second_text, True, is_pretokenized=isinstance(text, list))
            for text, second_text in zip(texts, seconds, strict=True)
        ]

    def _encode(
        self, text: str | list[str], pair: str | None, special: bool, is_pretokenized: bool = False
    ) -> Any:
        try:
            return self._inner.encode(text, pair, is_pretokenized, add_special_tokens=special)
        except Exception as error:  # a bare one from Rust: the unknown token is not in the vocabulary
            raise InputError(
                f"{self._path}: cannot tokenize {text[:60]!r}: {error}",
                code="tokenizer-failed",
            ) from error

    def decode_batch(self, token_ids: Sequence[Sequence[int]], keep_special: bool = False) -> list[str]:
        """Return the text of each row of ids; with its special tokens only if `keep_special`."""
        texts = [self._inner.decode(row, skip_special_tokens=not keep_special) for row in token_ids]
        return [clean_up_tokenization(text) for text in texts] if self._facts.clean_up else texts


def clean_up_tokenization(text: str) -> str:
    """Return `text` without the spaces that WordPiece leaves before punctuation."""
    for spaced, replacement in CLEANUP_REPLACEMENTS:
        text = text.replace(spaced, replacement)
    return text


def _open(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # bare Exceptions from Rust: the file cannot be read
        raise InputError(
            f"{path}: the tokenizer cannot be read: {error}", code="damaged-tokenizer"
        ) from error
    inner.no_truncation()
    inner.no_padding()
    return inner


class HubTokenizer:
    """Wraps `inner`, a transformers tokenizer.

    Only one thread at a time may use it: a call of a fast one sets the truncation in the tokenizer itself,
    which fails while another thread tokenizes ("Already borrowed"); slow ones keep their mode in attributes.
    """

    reader = "transformers"

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.prefix = tokenizer_prefix(inner)
        self.lower = bool(getattr(inner, "smelt_lower", False))
        self.prompts: PromptTemplate | None = getattr(inner, "smelt_prompts", None)
        self.truncation_side: str = inner.truncation_side
        self.spaces_words = bool(inner.is_fast and reads_spaces(inner.backend_tokenizer))
        self.model_max_length = int(inner.model_max_length)
        self.pad_token_id: int | None = inner.pad_token_id
        self.bos_token_id: int | None = inner.bos_token_id
        self.eos_token_id: int | None = inner.eos_token_id
        self.mask_token_id: int | None = inner.mask_token_id
        self._lock = threading.Lock()

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, each with its pair, with special tokens; truncated to `max_length` tokens."""
        if not texts:
            return EncodedTexts([], None, 0)
        batch_texts = [list(texts)] if pairs is None else [list(texts), list(pairs)]
        with self._lock:
            encoding = self.inner(*batch_texts, truncation=False, verbose=False)
            truncated = sum(len(ids) > max_length for ids in encoding["input_ids"])
            if truncated:
                encoding = self.inner(*batch_texts, truncation=True, max_length=max_length, verbose=False)
        return EncodedTexts(encoding["input_ids"], encoding.get("token_type_ids"), truncated)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize `texts` without adding special tokens; those that are in a text are single tokens."""
        if not texts:
            return []
        with self._lock:
            token_ids: list[list[int]] = self.inner(
                list(texts), add_special_tokens=False, truncation=False, verbose=False
            )["input_ids"]
        return token_ids

    def encodings(self, texts: Sequence[str | list[str]], pairs: Sequence[str] | None = None) -> list[Any]:
        """Tokenize `texts`, as `TextTokenizer.encodings`."""
        if not self.inner.is_fast:
            raise InputError(
                f"{type(self.inner).__name__}: this tokenizer does not return the word of each token. Use a"
                " model with a tokenizer.json (a fast tokenizer of transformers).",
                code="slow-tokenizer",
            )
        if not texts:
            return []
        batch_texts = [list(texts)] if pairs is None else [list(texts), list(pairs)]
        is_split = isinstance(texts[0], list)
        with self._lock:
            encoded = self.inner(*batch_texts, is_split_into_words=is_split, truncation=False, verbose=False)
        encodings: list[Any] = encoded.encodings
        return encodings

    def decode_batch(self, token_ids: Sequence[Sequence[int]], keep_special: bool = False) -> list[str]:
        """Return the text of each row of ids; with its special tokens only if `keep_special`."""
        if not token_ids:
            return []
        with self._lock:
            rows = [list(row) for row in token_ids]
            texts: list[str] = self.inner.batch_decode(rows, skip_special_tokens=not keep_special)
        return texts


def as_text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """Return `tokenizer`, as a `TextTokenizer` if it is one of transformers."""
    if hasattr(tokenizer, "encode_batch"):
        text_tokenizer: TextTokenizer = tokenizer
        return text_tokenizer
    return HubTokenizer(tokenizer)


def open_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer of the model in `folder`, with the lightest reader that is verified to be exact.

    Raises:
        InputError: its files are missing or do not match.
    """
    return open_light_tokenizer(folder, read_tokenizer_info(folder)) or as_text_tokenizer(
        _load_transformers_tokenizer(folder)
    )


def open_light_tokenizer(folder: Path, details: TokenizerInfo) -> TextTokenizer | None:
    """Return the tokenizer in `folder` without transformers; None where transformers is needed."""
    if details.reader == "transformers":
        return None
    rules = read_text_rules(folder)
    if details.reader == "sentencepiece":
        return MarianTokenizer(folder, details, rules.prefix)

    return RustTokenizer(folder, details, rules.prefix, rules.lower, read_prompt_template(folder))


def _load_transformers_tokenizer(folder: Path) -> Any:
    from smelt.models.checkpoint import load_tokenizer

    return load_tokenizer(folder)


def encode_texts(
    texts: Sequence[str], tokenizer: Any, max_length: int, pairs: Sequence[str | None] | None = None
) -> EncodedTexts:
    """Tokenize `texts`, each with the model's prefix, truncated to `max_length` tokens.

    Prompts of a model that answers them are rendered by its template, and truncated on the left.

    Args:
        texts: n texts.
        tokenizer: a `TextTokenizer`, or one of transformers.
        max_length: the maximum number of tokens of a row; in a pair the longer text is truncated first.
        pairs: each text's second text, or None where it has none.
    """
    text_tokenizer = as_text_tokenizer(tokenizer)
    if text_tokenizer.prompts is not None:
        full_ids = encode_prompts(texts, text_tokenizer, NO_LIMIT)
        ids = [truncate_prompt(row, max_length, text_tokenizer.bos_token_id) for row in full_ids]
        return EncodedTexts(ids, None, sum(len(row) > max_length for row in full_ids))
    texts = [text_tokenizer.prefix + text for text in texts] if text_tokenizer.prefix else list(texts)
    texts = [text.lower() for text in texts] if text_tokenizer.lower else texts
    seconds = {i: p for i, p in enumerate(pairs or ()) if p is not None}
    if seconds and len(seconds) < len(texts):
        return _encode_mixed(texts, text_tokenizer, max_length, seconds)
    return text_tokenizer.encode_batch(texts, max_length, list(seconds.values()) or None)


def _encode_mixed(
    texts: list[str], tokenizer: TextTokenizer, max_length: int, seconds: Mapping[int, str]
) -> EncodedTexts:
    """Tokenize texts of which only some have a second one: an empty one would add a separator."""
    single_indices = [i for i in range(len(texts)) if i not in seconds]
    ids: list[list[int]] = [[] for _ in texts]
    types: list[list[int]] = [[] for _ in texts]
    truncated = 0
    for indices, batch_pairs in ((single_indices, None), (list(seconds), list(seconds.values()))):
        encoded = tokenizer.encode_batch([texts[i] for i in indices], max_length, batch_pairs)
        truncated += encoded.truncated
        for position, i in enumerate(indices):
            ids[i] = encoded.ids[position]
            types[i] = encoded.types[position] if encoded.types else []
    return EncodedTexts(ids, types if all(types) else None, truncated)


def uses_token_types(config: Mapping[str, Any]) -> bool:
    """Return whether a classifier distinguishes the two texts of a pair by token types, as BERT does."""
    family = find_family(config)
    return family is not None and family.token_types == "pairs"


def encode_prompts(texts: Sequence[str], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Tokenize `texts`, truncated to their last `max_tokens` tokens. An empty one gets a first token.

    The prompts of a model that answers them are rendered by its template first. A rendered chat contains its
    special tokens, so none are added.

    Raises:
        InputError: an empty prompt, and the tokenizer has no first token; or a prompt does not fit the
            template (see `PromptTemplate.render_prompts`).
    """
    text_tokenizer = as_text_tokenizer(tokenizer)
    full_ids = encode_rendered(_render(texts, text_tokenizer), text_tokenizer)
    return [truncate_prompt(ids, max_tokens, text_tokenizer.bos_token_id) for ids in full_ids]


def _render(texts: Sequence[str], words: TextTokenizer) -> list[str]:
    return list(texts) if words.prompts is None else words.prompts.render_prompts(texts)


def encode_rendered(texts: Sequence[str], words: TextTokenizer) -> list[list[int]]:
    """Tokenize prompts that their template has rendered; an empty one gets a first token."""
    if words.prompts is not None and words.prompts.is_chat:
        token_ids = words.encode_plain(texts)
    else:
        token_ids = words.encode_batch(texts, NO_LIMIT).ids
    for index, ids in enumerate(token_ids):
        if not ids:
            first = words.bos_token_id if words.bos_token_id is not None else words.eos_token_id
            if first is None:
                raise InputError(
                    "The prompt is empty, and this tokenizer has no beginning-of-text token. Pass a"
                    " prompt that is not empty.",
                    code="empty-prompt",
                )
            token_ids[index] = [first]
    return token_ids


def truncate_prompt(ids: list[int], max_tokens: int, bos_token_id: int | None) -> list[int]:
    """Return the last `max_tokens` tokens of a prompt, keeping a leading `bos_token_id`."""
    if len(ids) <= max_tokens:
        return ids
    leading_ids = ids[:1] if ids[0] == bos_token_id and max_tokens > 1 else []
    return leading_ids + ids[len(ids) - max_tokens + len(leading_ids) :]


SENTENCEPIECE_FILE, MARIAN_VOCAB_FILE = "source.spm", "vocab.json"
_SPACE = "▁"


class MarianTokenizer:
    """Marian's tokenizer as a `TextTokenizer`: a SentencePiece model and a vocabulary, without transformers.

    Reads `folder`/source.spm and vocab.json; `details` is the tokenizer info next to them. Pieces are looked
    up in vocab.json, whose order is not SentencePiece's; a leading language token such as >>deu<< is one
    token; added tokens are found first, longest first; the source's model also decodes texts, as in
    transformers.

    Source: transformers' tokenization_marian.py and tokenization_python.py (5.23).
    """

    reader = "sentencepiece"
    lower = spaces_words = False
    prompts: PromptTemplate | None = None

    def __init__(self, folder: Path, details: TokenizerInfo, prefix: str = "") -> None:
        if details.eos is None or details.unknown is None:
            raise InputError(
                f"{folder}: tokenizing.json has no end-of-text token or no unknown token. Export the model"
                " again.",
                code="missing-special-token",
            )
        self.prefix = prefix
        self.truncation_side: str = details.truncation_side
        self.model_max_length = details.longest
        self.pad_token_id: int | None = details.pad
        self.bos_token_id: int | None = details.bos
        self.eos_token_id: int | None = details.eos
        self.mask_token_id: int | None = details.mask
        self._eos, self._unknown, self._facts = details.eos, details.unknown, details
        self._pieces = _open_sentencepiece(folder / SENTENCEPIECE_FILE)
        ids_by_token = read_json_object(folder / MARIAN_VOCAB_FILE) | details.added
        self._words = ids_by_token
        self._names = {token_id: token for token, token_id in ids_by_token.items()}
        self._ids = [
            ids_by_token.get(self._pieces.id_to_piece(i), self._unknown) for i in range(len(self._pieces))
        ]
        self._no_piece = self._pieces.unk_id()
        self._hidden = frozenset(details.special)
        longest_first = sorted(details.added, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, truncated to `max_length` tokens including the final one.

        Raises:
            InputError: there are pairs, which this tokenizer does not support.
        """
        if pairs is not None:
            raise InputError(
                "This model takes single texts, not pairs of texts.", code="unsupported-text-pairs"
            )
        token_rows = [self._encode(text) for text in texts]
        text_limit = max(0, max_length - 1)
        truncated = sum(len(row) > text_limit for row in token_rows)
        if truncated and self.truncation_side == "left":
            token_rows = [
                row[len(row) - text_limit :] if len(row) > text_limit else row for row in token_rows
            ]
        return EncodedTexts([[*row[:text_limit], self._eos] for row in token_rows], None, truncated)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize `texts` without adding the final token."""
        return [self._encode(text) for text in texts]

    def encodings(self, texts: Sequence[str | list[str]], pairs: Sequence[str] | None = None) -> list[Any]:
        """Raise an error: no encoder has this tokenizer.

        Raises:
            InputError: always.
        """
        raise InputError("This tokenizer does not return the word of each token.", code="slow-tokenizer")

    def decode_batch(self, token_ids: Sequence[Sequence[int]], keep_special: bool = False) -> list[str]:
        """Return the text of each row of ids; with its special tokens only if `keep_special`."""
        texts = [self._decode(row, keep_special) for row in token_ids]
        return [clean_up_tokenization(text) for text in texts] if self._facts.clean_up else texts

    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the final one."""
        parts = self._added.split(text)
        if len(parts) == 1:
            return self._encode_plain(text)
        added = self._facts.added
        return [
            i
            for segment in parts
            if segment
            for i in ([added[segment]] if segment in added else self._encode_plain(segment))
        ]

    def _encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text without added tokens."""
        start: list[int] = []
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            start, text = [self._words.get(text[: end + 2], self._unknown)], text[end + 2 :]
        piece_ids = self._pieces.encode(text)
        if (
            self._no_piece in piece_ids
        ):  # a token that is unknown in the source's model may be one of the target
            text_pieces = self._pieces.encode(text, out_type=str)
            return start + [self._words.get(piece, self._unknown) for piece in text_pieces]
        return start + [self._ids[piece_id] for piece_id in piece_ids]

    def _decode(self, row: Sequence[int], keep_special: bool) -> str:
        pieces = [self._token_text(i) for i in row if keep_special or i not in self._hidden]
        text: str = self._pieces.decode_pieces(pieces)
        return text.replace(_SPACE, " ").strip()

    def _token_text(self, token_id: int) -> str:
        name = self._names.get(token_id)
        return self._pieces.id_to_piece(token_id) if name is None else name


def _open_sentencepiece(path: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path}: the SentencePiece model cannot be read: {error}", code="damaged-tokenizer"
        ) from error
