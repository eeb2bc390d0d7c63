"""A tokenizer that an exported model needs neither torch nor transformers for.

What transformers runs is written down (`tokenizer.json` with all that it sets up while loading) and opened
again without it. Both readers are then compared on rows of the data, on awkward texts and on random ids;
where they differ, transformers reads the artifact's texts, and the report says why.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smelt.core.data import Example, Split
from smelt.core.files import load_json
from smelt.export.tokenizer.awkward_texts import AWKWARD
from smelt.runtime.text.hub_tokenizer import HubTokenizer
from smelt.runtime.text.limits import NO_LIMIT
from smelt.runtime.text.open_tokenizer import light_tokenizer
from smelt.runtime.text.rust_tokenizer import FILE as JSON
from smelt.runtime.text.tokenizer import TextTokenizer
from smelt.runtime.text.tokenizing_file import Tokenizing, write_tokenizing

ROWS = 256  # of the data, that are compared
_CUT = 8  # tokens, so that short texts are cut too
_SHORT = 300  # characters; transformers keeps what it cuts off, of pairs each part beside each
_BPE_FLAG = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@dataclass(frozen=True)
class Sample:
    """Texts (and pairs of texts) that two readers have to agree on, and ids for the way back."""

    texts: list[str]
    pairs: list[tuple[str, str]]
    rows: list[list[int]]


def export_tokenizer(hub: Any, src: Path, out: Path, data: Mapping[str, Split]) -> Tokenizing:
    """Make `out`, which holds a copy of the tokenizer's files, readable without transformers if it can be.

    Args:
        hub: the tokenizer of transformers that was read from `src`.
        src: the folder of the parent.
        out: the folder of the exported model; gets `tokenizing.json`.
        data: splits of the data; what they hold is compared.
    """
    from smelt.runtime.models.quiet import quiet

    details = facts_of(hub)
    if details.reader == "tokenizers":
        write_backend(hub, out / JSON)
    if details.reader != "transformers":
        with quiet():  # transformers says of every BPE tokenizer that it leaves blanks alone
            difference = find_difference(hub, out, details, sample_of(hub, data))
        if difference is not None:
            details = Tokenizing(reader="transformers", reason=difference.text)
            _restore(src / JSON, out / JSON)
    write_tokenizing(out, details)
    return details


def facts_of(hub: Any) -> Tokenizing:
    """Return who could read the texts of `hub`'s model, with all that the files do not say."""
    common = {
        "longest": min(int(hub.model_max_length), NO_LIMIT),
        "pad": hub.pad_token_id,
        "bos": hub.bos_token_id,
        "eos": hub.eos_token_id,
        "truncation_side": hub.truncation_side,
        "clean_up": bool(hub.clean_up_tokenization_spaces),
    }
    if hub.is_fast:
        kept = type(hub.backend_tokenizer.model).__name__ == "BPE" and getattr(hub, _BPE_FLAG, True) is False
        clean = common["clean_up"] and not kept
        types = "token_type_ids" in hub.model_input_names
        return Tokenizing(reader="tokenizers", types=types, **(common | {"clean_up": clean}))
    if type(hub).__name__ != "MarianTokenizer":
        return _by_transformers(f"{type(hub).__name__} runs in Python and has no other reader")
    tokens = hub.added_tokens_decoder
    if hub.separate_vocabs or hub.sp_model_kwargs or hub.split_special_tokens:
        return _by_transformers(
            "a Marian tokenizer with separate_vocabs, sp_model_kwargs or split_special_tokens"
        )
    if any(token.lstrip or token.rstrip or token.single_word for token in tokens.values()):
        return _by_transformers("an added token takes blanks around it along")
    return Tokenizing(
        reader="sentencepiece",
        added={str(token): place for place, token in tokens.items()},
        special=sorted(set(hub.all_special_ids)),
        unknown=hub.unk_token_id,
        **common,
    )


def _by_transformers(reason: str) -> Tokenizing:
    return Tokenizing(reader="transformers", reason=reason)


def write_backend(hub: Any, path: Path) -> None:
    """Write what transformers runs as `path`, which is left as it is where it says the same."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(hub.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    said = load_json(path) if path.is_file() else None
    if said != json.loads(backend.to_str()):
        backend.save(str(path))


def _restore(src: Path, out: Path) -> None:
    out.unlink(missing_ok=True)
    if src.is_file():
        shutil.copyfile(src, out)


def sample_of(hub: Any, data: Mapping[str, Split]) -> Sample:
    """Return rows of `data`, awkward texts, texts with special tokens inside, and ids drawn at random."""
    splits = (data[name].examples for name in ("calibration", "validation", "train") if name in data)
    examples: Sequence[Example] = next(splits, ())[:ROWS]
    texts = [text for e in examples for text in (e.text, *e.references)]
    marks = [str(token) for token in hub.all_special_tokens][:12]
    awkward = AWKWARD + marks + [f"a{m}b {m} c" for m in marks] + [m.upper() for m in marks]
    pairs = [(e.text, e.text_pair) for e in examples if e.text_pair is not None]
    pairs += list(zip(awkward, reversed(awkward), strict=True))
    random = np.random.default_rng(0)
    rows = random.integers(0, len(hub), (64, 12)).tolist()
    return Sample(texts + awkward, pairs, rows)


class Difference(NamedTuple):
    """What two readers do otherwise. kind: ids, types, pairs or texts. text: the same for a person."""

    kind: str
    text: str


def find_difference(hub: Any, out: Path, details: Tokenizing, sample: Sample) -> Difference | None:
    """Return what the reader of `details` does otherwise than transformers; None: nothing.

    Transformers' own tokenizer, read from `out`, has to agree as well: its files may have been written anew.
    """
    from smelt.runtime.models.checkpoint import load_tokenizer

    reference = HubTokenizer(hub)
    light = light_tokenizer(out, details)
    assert light is not None
    for other, name in ((HubTokenizer(load_tokenizer(out)), "the exported tokenizer"), (light, light.reader)):
        found = _difference(reference, other, sample, details.reader == "tokenizers")
        if found is not None:
            return found._replace(text=f"{name} differs from transformers' tokenizer: {found.text}")
    return None


def _difference(one: TextTokenizer, other: TextTokenizer, sample: Sample, paired: bool) -> Difference | None:
    rows = list(sample.rows)
    for length, most in ((NO_LIMIT, NO_LIMIT), (_CUT, _SHORT)):
        texts = [text for text in sample.texts if len(text) <= most]
        expected, got = one.encode_rows(texts, length), other.encode_rows(texts, length)
        rows += expected.ids if length == NO_LIMIT else []
        for text, a, b in zip(texts, expected.ids, got.ids, strict=True):
            if a != b:
                return Difference("ids", f"ids of {text[:40]!r}")
        if (expected.types, expected.truncated) != (got.types, got.truncated):
            return Difference("types", "token types, or which texts are cut")
        if paired:
            pairs = [pair for pair in sample.pairs if max(map(len, pair)) <= most]
            firsts, seconds = [a for a, _ in pairs], [b for _, b in pairs]
            if one.encode_rows(firsts, length, seconds) != other.encode_rows(firsts, length, seconds):
                return Difference("pairs", "pairs of texts")
    for row, said, read in zip(rows, one.decode_rows(rows), other.decode_rows(rows), strict=True):
        if said != read:
            return Difference("texts", f"the text of the ids {row[:8]}")
    return None
