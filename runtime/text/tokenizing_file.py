"""Which tokenizer reads an exported model's texts, and what its own files do not say.

The onnx stage writes `tokenizing.json` beside the tokenizer's files, once it has compared the light reader
with transformers' own tokenizer (`smelt.export.tokenizer.tokenizer_export`). An artifact without it is read
by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError
from smelt.core.files import load_json, write_json
from smelt.runtime.text.limits import NO_LIMIT

FILE = "tokenizing.json"
Reader = Literal["tokenizers", "sentencepiece", "transformers"]


class Tokenizing(BaseModel):
    """reader: who reads. reason: why transformers has to.

    longest: the most tokens of a row. pad, bos, eos: ids. types: whether rows have token types.
    clean_up: whether blanks before punctuation go. Of sentencepiece alone: added: tokens that are never
    cut into pieces, with their ids; special: ids that are not shown; unknown: the id of what has none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reader: Reader
    reason: str = ""
    longest: int = NO_LIMIT
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    types: bool = False
    truncation_side: Literal["left", "right"] = "right"
    clean_up: bool = False
    added: dict[str, int] = Field(default_factory=dict)
    special: list[int] = Field(default_factory=list)
    unknown: int | None = None


def read_tokenizing(folder: Path) -> Tokenizing:
    """Return what stands in `folder`; transformers reads where nothing does.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return Tokenizing(reader="transformers", reason=f"there is no {FILE} in this folder")
    try:
        return Tokenizing.model_validate(load_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"{path}: not what this version of smelt reads: {error}", code="damaged-file"
        ) from error


def write_tokenizing(folder: Path, details: Tokenizing) -> None:
    """Write `details` into `folder`."""
    write_json(folder / FILE, details.model_dump(exclude_defaults=True))
