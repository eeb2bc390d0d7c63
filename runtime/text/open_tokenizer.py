"""Opens the tokenizer of a model's folder, with the lightest reader that is known to be exact.

The libraries that the readers stand on are imported when one is made; transformers' own imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.runtime.text.hub_tokenizer import text_tokenizer
from smelt.runtime.text.rules import read_text_rules
from smelt.runtime.text.tokenizer import TextTokenizer
from smelt.runtime.text.tokenizing_file import Tokenizing, read_tokenizing


def open_tokenizer(folder: Path) -> TextTokenizer:
    """Open the tokenizer of the model in `folder`, with the lightest reader that is known to be exact.

    Raises:
        InputError: its files are missing or do not fit together.
    """
    return light_tokenizer(folder, read_tokenizing(folder)) or text_tokenizer(_of_transformers(folder))


def light_tokenizer(folder: Path, details: Tokenizing) -> TextTokenizer | None:
    """Open the tokenizer in `folder` without transformers; None where that has to read it."""
    if details.reader == "transformers":
        return None
    rules = read_text_rules(folder)
    if details.reader == "sentencepiece":
        from smelt.runtime.text.marian_tokenizer import MarianTokenizer

        return MarianTokenizer(folder, details, rules.prefix)
    from smelt.runtime.text.rust_tokenizer import RustTokenizer

    return RustTokenizer(folder, details, rules.prefix, rules.lower)


def _of_transformers(folder: Path) -> Any:
    from smelt.runtime.models.checkpoint import load_tokenizer

    return load_tokenizer(folder)
