"""A model of which only one block is in memory: read from its file, changed, written, forgotten.

For stages that go through a model block by block. The weights of a block are float32 while it is there. What
is written is a checkpoint in shards, one a block and one of all other tensors, in the types that the source
has (or another that is wanted). In memory are besides what the model computes before its first block and
between its stacks; an output head that is not the embedding never is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.core.files import write_json
from smelt.core.messages import Message
from smelt.core.stage import StoredDtype
from smelt.families.registry import family_of
from smelt.families.walk import Block, blocks_of, head_of
from smelt.runtime.layers.quantized import is_quantized, matrix_types
from smelt.runtime.models.checkpoint import save_beside
from smelt.runtime.models.making.empty_model import empty_model
from smelt.runtime.models.stored_dtype import narrowed, stored_types, weight_bytes
from smelt.runtime.models.structure import Edit, with_masks
from smelt.runtime.models.weight_files import INDEX, weight_tensors

# A model whose file is larger than this is taken block by block.
LARGE_BYTES = 2**30


class StreamedModel:
    """A model that is read from `src` and written to `out` block by block.

    model: its blocks are on the meta device but for the one that was entered. edits: its structure.
    """

    def __init__(
        self, model: Any, edits: list[Edit], places: dict[str, Path], src: Path, out: Path, dtype: StoredDtype
    ) -> None:
        self.model, self.edits = model, edits
        self._notes: list[Message] = []
        self._places, self._src, self._out = places, src, out
        self._types = stored_types(src, dtype)
        self._files: dict[str, str] = {}
        self._bytes = 0
        self._blocks = blocks_of(model)

    def enter(self, block: Block) -> None:
        """Read the weights of `block`, float32."""
        names = {name: f"{block.place}.{name}" for name, _ in block.module.named_parameters()}
        _assign(block.module, names, self._places)

    def leave(self, block: Block) -> None:
        """Write the block as it is now, and forget its weights."""
        number = self._blocks.index(block)
        self._write(number, {f"{block.place}.{n}": t for n, t in block.module.state_dict().items()})
        for module in block.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
        _give_back()

    def enter_head(self) -> None:
        """Read the weights of the output head, float32, where it is not the embedding."""
        for place in head_of(self.model):
            named = self.model.get_submodule(place).named_parameters()
            names = {f"{place}.{name}": f"{place}.{name}" for name, tensor in named if tensor.is_meta}
            _assign(self.model, names, self._places)

    def finish(self, edits: list[Edit]) -> list[Message]:
        """Write what is in no block, and all that lies beside the weights; every block has to be written.

        Of that, layers that became codes are written as they are now, and all others as they were.

        Args:
            edits: the structure that the model has now.

        Returns:
            What the user should know: weights that do not fit into 16 bits.
        """
        inside = tuple(f"{block.place}." for block in self._blocks)
        named = self.model.named_modules(remove_duplicate=False)
        coded = {n: m for n, m in named if is_quantized(m) and not n.startswith(inside)}
        others = [n for n in self._places if not n.startswith((*inside, *(f"{name}." for name in coded)))]
        tensors = {name: _read(self._places, name) for name in others}
        written: set[int] = set()  # one that several layers have is written once, under its first name
        for name, module in coded.items():
            held = {f"{name}.{n}": t for n, t in module.named_parameters() if id(t) not in written}
            written |= {id(tensor) for tensor in held.values()}
            tensors |= held
        self._write(len(self._blocks), tensors)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._files.items()))}
        write_json(self._out / INDEX, index)
        dtype = str(self._types.common).removeprefix("torch.")
        save_beside(self.model, with_masks(self.model, edits), self._out, self._src, dtype)
        return self._notes

    def _write(self, number: int, tensors: dict[str, Tensor]) -> None:
        file = f"model-{number + 1:05}-of-{len(self._blocks) + 1:05}.safetensors"
        coded = matrix_types(self.model)
        wanted = {n: coded.get(n) or self._types.of([n]) for n, t in tensors.items() if t.is_floating_point()}
        stored, notes = narrowed({n: t.detach().contiguous() for n, t in tensors.items()}, wanted)
        self._notes.extend(notes)
        save_file(stored, self._out / file, metadata={"format": "pt"})
        self._files |= dict.fromkeys(stored, file)
        self._bytes += sum(t.numel() * t.element_size() for t in stored.values())


def open_streamed(
    src: Path, out: Path, dtype: StoredDtype = "keep", larger_than: int | None = None
) -> StreamedModel | None:
    """Return the model in `src` to be taken block by block, None where it has to be loaded whole.

    That is a model of at most `larger_than` bytes (LARGE_BYTES unless given), one of quantized or shared
    layers, and one whose file does not name all weights of its blocks as the model does (the old names of
    some checkpoints).

    Args:
        src: its folder.
        out: an empty folder, where it is written.
        dtype: how float weights are stored.
        larger_than: bytes of its files.

    Raises:
        InputError: the folder holds no readable model.
    """
    if weight_bytes(src) <= (LARGE_BYTES if larger_than is None else larger_than):
        return None
    model, edits = empty_model(src)
    family = family_of(model)
    if family is None or family.turned or any(e.get("op") in ("quantize", "share") for e in edits):
        return None
    places = {name: path for path, name, _ in weight_tensors(src)}
    blocks = blocks_of(model)
    if any(block.aliases for block in blocks) or not _reads_all(model, blocks, places):
        return None
    model.eval()
    return StreamedModel(model, edits, places, src, out, dtype)


def _reads_all(model: Any, blocks: Iterable[Block], places: dict[str, Path]) -> bool:
    """Read what is in no block and not in the head; say whether the file has that and the blocks."""
    inside = tuple(f"{block.place}." for block in blocks)
    head = tuple(f"{name}." for name in head_of(model))
    wanted = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if any(n.startswith(inside) and n not in places for n in wanted):
        return False
    outside = {n for n in wanted if not n.startswith((*inside, *head))}
    names = {n: n if n in places else tied.get(n, n) for n in outside}
    if any(n not in places for n in names.values()):
        return False
    read = set(names.values())  # a head that is the embedding stays one with it, as in a whole model
    names |= {n: tied[n] for n in wanted - outside if n not in places and tied.get(n) in read}
    _assign(model, names, places)
    return True


@torch.no_grad()
def _assign(root: nn.Module, names: dict[str, str], places: dict[str, Path]) -> None:
    """Give the parameters of `root` the values of the file, float32: by their names those in the file.

    Those that have one name in the file are one.
    """
    made: dict[str, nn.Parameter] = {}
    for name, stored in names.items():
        owner, _, last = name.rpartition(".")
        if stored not in made:
            held = _read(places, stored).to(torch.float32, copy=True)  # and not a view of the file
            made[stored] = nn.Parameter(held, requires_grad=False)
        setattr(root.get_submodule(owner), last, made[stored])


def _give_back() -> None:
    """Give freed memory back to the system, where the C library is glibc.

    It keeps what is free between pieces that are not, and with each block there would be more of that.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _read(places: dict[str, Path], name: str) -> Tensor:
    with safe_open(places[name], framework="pt") as file:
        found: Tensor = file.get_tensor(name)
    return found
