"""Opens a model's tokenizer with the lightest reader that is verified to be exact.

The readers' libraries are imported when a reader is created; transformers' tokenizers import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.runtime.text.hub_tokenizer import as_text_tokenizer
from smelt.runtime.text.text_preprocessing import read_text_rules
from smelt.runtime.text.tokenizer import TextTokenizer
from smelt.runtime.text.tokenizer_info import TokenizerInfo, read_tokenizer_info


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
        from smelt.runtime.text.marian_tokenizer import MarianTokenizer

        return MarianTokenizer(folder, details, rules.prefix)
    from smelt.runtime.text.rust_tokenizer import RustTokenizer

    return RustTokenizer(folder, details, rules.prefix, rules.lower)


def _load_transformers_tokenizer(folder: Path) -> Any:
    from smelt.runtime.models.checkpoint import load_tokenizer

    return load_tokenizer(folder)
