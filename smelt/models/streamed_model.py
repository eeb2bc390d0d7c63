"""A model of which only one block is in memory: read from its file, changed, written, freed.

For stages that process a model block by block. The weights of a loaded block are float32. The output is a
checkpoint in shards, one per block and one of all other tensors, in the types of the source
(or another requested one). The layers before the first block and between the stacks also stay in memory,
16-bit embeddings of a decoder-only model as a mapped file; an output layer that is not the embedding does
not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.core.files import write_json
from smelt.core.messages import Message
from smelt.models.checkpoint import save_config_files
from smelt.models.edits import Edit, add_mask_edits
from smelt.models.empty_model import cast_to_stored, empty_model, quantized_dtypes, stored_dtypes
from smelt.models.families.registry import Block, blocks_of, family_of, output_modules
from smelt.models.weight_files import WEIGHTS_INDEX_FILE, is_large, weight_tensors
from smelt.quantization.layers import is_quantized
from smelt.stage import StoredDtype


class StreamedModel:
    """A model that is read from `src` and written to `out` block by block.

    model: its blocks are on the meta device except the loaded one. edits: its structure. changed: modules
    outside of blocks whose own weights are written in their current state, not copied.
    """

    def __init__(
        self, model: Any, edits: list[Edit], places: dict[str, Path], src: Path, out: Path, dtype: StoredDtype
    ) -> None:
        self.model, self.edits = model, edits
        self.changed: set[nn.Module] = set()
        self._notes: list[Message] = []
        self._places, self._src, self._out = places, src, out
        self._types = stored_dtypes(src, dtype)
        self._files: dict[str, str] = {}
        self._bytes = 0
        self._blocks = blocks_of(model)
        self._inside = tuple(f"{block.module_path}." for block in self._blocks)
        self._head_weights: set[str] = set()
        self._modules = dict(model.named_modules(remove_duplicate=False))

    def load_block(self, block: Block) -> None:
        """Read the weights of `block`, float32."""
        names = {name: f"{block.module_path}.{name}" for name, _ in block.module.named_parameters()}
        _assign(block.module, names, self._places)

    def save_block(self, block: Block) -> None:
        """Write the current block, and free its weights."""
        number = self._blocks.index(block)
        self._write(number, {f"{block.module_path}.{n}": t for n, t in block.module.state_dict().items()})
        self.free_block(block)

    def free_block(self, block: Block) -> None:
        """Free the weights of `block`."""
        _free_weights(block.module, [name for name, _ in block.module.named_parameters()])

    def copy_blocks(self) -> None:
        """Write the blocks of a model that has lost some blocks or parts of them; weights are copied."""
        self._blocks = blocks_of(self.model)
        current_names = {module: name for name, module in self.model.named_modules()}
        sources: dict[str, str] = {}
        for old in self._places:
            parent_name, _, last = old.rpartition(".")
            new = current_names.get(self._modules.get(parent_name, self.model), "")
            if old.startswith(self._inside) and new:
                sources[f"{new}.{last}"] = old
        for number, block in enumerate(self._blocks):
            block_sources = {n: old for n, old in sources.items() if n.startswith(f"{block.module_path}.")}
            self._write(
                number, {n: _read(self._places, old) for n, old in block_sources.items()}, block_sources
            )

    def load_head(self) -> None:
        """Read the weights of the output layer, float32, unless it is the embedding."""
        for module_path in output_modules(self.model):
            module_parameters = self.model.get_submodule(module_path).named_parameters()
            names = {
                f"{module_path}.{name}": f"{module_path}.{name}"
                for name, tensor in module_parameters
                if tensor.is_meta
            }
            _assign(self.model, names, self._places)
            self._head_weights |= names.keys()

    def free_head(self) -> None:
        """Free the weights of the output layer that `load_head` has read."""
        _free_weights(self.model, self._head_weights)

    def finish(self, edits: list[Edit]) -> list[Message]:
        """Write the tensors outside of blocks and the other files; every block must be written before.

        Layers that were quantized or are in `changed` are written in their current state, all others
        unchanged.

        Args:
            edits: the current structure of the model.

        Returns:
            Warnings: weights that do not fit into 16 bits.
        """
        block_prefixes = self._inside
        all_modules = self.model.named_modules(remove_duplicate=False)
        changed_modules = {
            n: m
            for n, m in all_modules
            if (is_quantized(m) or m in self.changed) and not n.startswith(block_prefixes)
        }
        copied_names = {
            n
            for n in self._places
            if not n.startswith((*block_prefixes, *(f"{name}." for name in changed_modules)))
        }
        tensors = {name: _read(self._places, name) for name in self._places if name in copied_names}
        parameters = {n: p for n, p in self.model.named_parameters(remove_duplicate=False) if not p.is_meta}
        # one that several layers have is written once, under its first name
        written_ids = {id(tensor) for name, tensor in parameters.items() if name in copied_names}
        for name, module in changed_modules.items():
            module_tensors = {
                f"{name}.{n}": t for n, t in module.named_parameters() if id(t) not in written_ids
            }
            written_ids |= {id(tensor) for tensor in module_tensors.values()}
            tensors |= module_tensors
        for name, tensor in parameters.items():  # an output layer whose embedding was quantized
            if id(tensor) not in written_ids and not name.startswith(block_prefixes):
                written_ids.add(id(tensor))
                tensors[name] = tensor
        self._write(len(self._blocks), tensors)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._files.items()))}
        write_json(self._out / WEIGHTS_INDEX_FILE, index)
        dtype = str(self._types.default).removeprefix("torch.")
        save_config_files(self.model, add_mask_edits(self.model, edits), self._out, self._src, dtype)
        return self._notes

    def _write(
        self, number: int, tensors: dict[str, Tensor], sources: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Write shard `number`; sources: names in the source of renamed tensors."""
        file = f"model-{number + 1:05}-of-{len(self._blocks) + 1:05}.safetensors"
        quantized_types = quantized_dtypes(self.model)
        dtypes = {
            n: quantized_types.get(n) or self._types.dtype_for([sources.get(n, n)])
            for n, t in tensors.items()
            if t.is_floating_point()
        }
        stored_tensors, notes = cast_to_stored(
            {n: t.detach().contiguous() for n, t in tensors.items()}, dtypes
        )
        self._notes.extend(notes)
        save_file(stored_tensors, self._out / file, metadata={"format": "pt"})
        self._files |= dict.fromkeys(stored_tensors, file)
        self._bytes += sum(t.numel() * t.element_size() for t in stored_tensors.values())


def open_streamed(src: Path, out: Path, dtype: StoredDtype = "keep") -> StreamedModel | None:
    """Return the model in `src` for processing block by block, None where it must be loaded whole.

    The latter are models that are not large (`is_large`), with quantized or shared layers, or whose file has
    other names for weights of its blocks than the model (the old names of some checkpoints).

    Args:
        src: its folder.
        out: an empty folder for the output.
        dtype: storage type of float weights.

    Raises:
        InputError: the folder holds no readable model.
    """
    if not is_large(src):
        return None
    model, edits = empty_model(src)
    family = family_of(model)
    if (
        family is None
        or family.transposed_suffixes
        or any(e.get("op") in ("quantize", "share") for e in edits)
    ):
        return None
    paths_by_name = {name: path for path, name, _ in weight_tensors(src)}
    blocks = blocks_of(model)
    if any(len(block.call_indices) > 1 for block in blocks) or not _load_outside_blocks(
        model, blocks, paths_by_name
    ):
        return None
    model.eval()
    return StreamedModel(model, edits, paths_by_name, src, out, dtype)


def _load_outside_blocks(model: Any, blocks: Iterable[Block], places: dict[str, Path]) -> bool:
    """Read the tensors outside of blocks and output layer; return whether the file has all tensors."""
    block_prefixes = tuple(f"{block.module_path}." for block in blocks)
    head = tuple(f"{name}." for name in output_modules(model))
    parameter_names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    tied_weights = getattr(model, "all_tied_weights_keys", None) or {}
    if any(n.startswith(block_prefixes) and n not in places for n in parameter_names):
        return False
    outer_names = {n for n in parameter_names if not n.startswith((*block_prefixes, *head))}
    names = {n: n if n in places else tied_weights.get(n, n) for n in outer_names}
    if any(n not in places for n in names.values()):
        return False
    read_names = set(names.values())  # an output layer that is the embedding stays tied, as in a whole model
    names |= {
        n: tied_weights[n]
        for n in parameter_names - outer_names
        if n not in places and tied_weights.get(n) in read_names
    }
    family = family_of(model)  # others may read their dtype from the first parameter
    mapped_names = (
        _map_embeddings(model, names, places) if family and family.architecture == "decoder" else set()
    )
    _assign(model, {n: source_name for n, source_name in names.items() if n not in mapped_names}, places)
    return True


def _map_embeddings(model: Any, names: dict[str, str], places: dict[str, Path]) -> set[str]:
    """Map the 16-bit embeddings among `names` into memory; return the names of all parameters with them.

    Only the rows that are looked up are read. They are widened afterwards, which is exact.
    """
    mapped: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        source_name = names.get(f"{path}.weight")
        if type(module) is not nn.Embedding or source_name is None:
            continue
        tensor = _read(places, source_name)
        if tensor.dtype in (torch.bfloat16, torch.float16):
            mapped[source_name] = nn.Parameter(tensor, requires_grad=False)
            module.register_forward_hook(lambda module, given, rows: rows.float())
    mapped_names = {name for name, source_name in names.items() if source_name in mapped}
    for name in mapped_names:
        parent_name, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent_name), last, mapped[names[name]])
    return mapped_names


@torch.no_grad()
def _assign(root: nn.Module, names: dict[str, str], places: dict[str, Path]) -> None:
    """Set the parameters of `root` to the values of the file, float32: file names by their names.

    Parameters with the same name in the file are tied.
    """
    parameters: dict[str, nn.Parameter] = {}
    for name, source_name in names.items():
        parent_name, _, last = name.rpartition(".")
        if source_name not in parameters:
            value_fp32 = _read(places, source_name).to(torch.float32, copy=True)  # not a view of the file
            parameters[source_name] = nn.Parameter(value_fp32, requires_grad=False)
        setattr(root.get_submodule(parent_name), last, parameters[source_name])


def _free_weights(root: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        parent_name, _, last = name.rpartition(".")
        module = root.get_submodule(parent_name)
        setattr(module, last, nn.Parameter(getattr(module, last).detach().to("meta"), requires_grad=False))
    _trim_memory()


def _trim_memory() -> None:
    """Return freed memory to the system, where the C library is glibc.

    It keeps free memory between allocated pieces, which would grow with each block.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _read(places: dict[str, Path], name: str) -> Tensor:
    with safe_open(places[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
