"""Write the tokenizer of an exported model."""

from __future__ import annotations

from pathlib import Path

from smelt.core.stage import Context
from smelt.export.tokenizer.export_tokenizer import export_tokenizer
from smelt.runtime.models.checkpoint import load_tokenizer


def add_tokenizer(folder: Path, ctx: Context) -> None:
    """Write a tokenizer that works without transformers, if it is exact."""
    found = export_tokenizer(load_tokenizer(folder), folder, ctx.out, ctx.data)
    ctx.details["tokenizer"] = found.reader
    if found.reason:
        ctx.warn(
            "slow-tokenizer",
            f"Texts are tokenized by transformers, which takes seconds to import: {found.reason}",
        )
