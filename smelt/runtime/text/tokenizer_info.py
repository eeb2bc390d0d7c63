"""The tokenizer reader of an exported model, and properties that its own files do not have.

The onnx stage writes `tokenizing.json` next to the tokenizer's files, once it has compared the light reader
with transformers' own tokenizer (`smelt.export.tokenizer.export_tokenizer`). An artifact without it is read
by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError
from smelt.core.files import load_json, write_json
from smelt.runtime.text.length_limits import NO_LIMIT

TOKENIZER_INFO_FILE = "tokenizing.json"
TokenizerReader = Literal["tokenizers", "sentencepiece", "transformers"]


class TokenizerInfo(BaseModel):
    """reader: the library. reason: why transformers is needed.

    longest: maximum number of tokens of a row. pad, bos, eos: ids. types: whether rows have token types.
    clean_up: whether spaces before punctuation are removed. For sentencepiece only: added: tokens that are
    never split into pieces, with their ids; special: ids that are not shown; unknown: the id of unknown
    tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reader: TokenizerReader
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
