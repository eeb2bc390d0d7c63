"""How many values a model has, told by the headers of its files: those that have a place in it."""

from __future__ import annotations

from pathlib import Path

from smelt.core.files import read_json
from smelt.runtime.models.places.unread_tensors import is_unread
from smelt.runtime.models.structure import Edit, read_edits, scheme_options
from smelt.runtime.models.weight_files import values_in, weight_tensors
from smelt.runtime.schemes.registry import check_options, find
from smelt.runtime.text.sentence_files import MODULES


def count_parameters(folder: Path) -> int:
    """Return the number of values in the weights of `folder`, read from their headers.

    Packed codes count as what they hold (see `Stored.packs`). What no model reads (masks and positions that
    old checkpoints hold) is none of it.
    """
    packed = _packed(read_edits(folder))
    family, embeds = str(read_json(folder / "config.json").get("model_type")), (folder / MODULES).is_file()
    return sum(
        packed.get(name, 1) * values_in(entry)
        for _, name, entry in weight_tensors(folder)
        if not is_unread(family, name, embeds=embeds)
    )


def _packed(edits: list[Edit]) -> dict[str, int]:
    """Return how many values an element holds, by the names of quantized matrices' tensors."""
    found: dict[str, int] = {}
    for edit in (e for e in edits if e.get("op") == "quantize"):
        scheme, options = find(edit.get("scheme")), scheme_options(edit)
        check_options(scheme, options)
        for name, stored in scheme.storage(1, 1, options).items():
            # behind `coded` where an adapter stands beside the codes, or their inputs are binary; or both
            for place in ("matrix", "coded.matrix", "coded.coded.matrix"):
                found[f"{edit.get('module')}.{place}.{name}"] = stored.packs
    return found
