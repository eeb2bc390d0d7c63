"""A model for inference of which only the loaded blocks are in memory; all else is in memory from the start.

Any model that `load_model` reads can be read so, also one with quantized, shared or low-rank layers. Weights
are float32, quantized ones in the layout of their scheme, as `load_model` returns them. A model of a family
without blocks is in memory whole. (`smelt.models.streamed_model` also writes blocks, for stages.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from smelt.core.system import require_memory
from smelt.models.checkpoint import add_model_prefix, load_weights
from smelt.models.empty_model import empty_model, transpose_conv1d_tensors
from smelt.models.families.registry import blocks_of
from smelt.models.model_size import FLOAT_BYTES
from smelt.models.streamed_model import trim_memory
from smelt.models.weight_files import weight_tensors
from smelt.quantization.layers import QuantizedMatrix


class BlockwiseModel:
    """The model in `folder`, in eval mode. edits: its structure.

    Raises:
        InputError: weights are missing, damaged, or do not match the config and the edits.
        RunError: there is not enough memory for the largest block and what is outside of blocks.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.edits = empty_model(folder)
        self._device = "cpu"
        files = {name: (path, name) for path, name, _ in weight_tensors(folder)}
        self._files = add_model_prefix(self.model, files)
        in_blocks = self._names_in_blocks()
        tensors = {name: self._read(name) for name in self._files}  # mapped into memory, not read yet
        tensors = {
            name: tensor.to("meta") if name in in_blocks else tensor for name, tensor in tensors.items()
        }
        outside_bytes = sum(FLOAT_BYTES * t.numel() for t in tensors.values() if not t.is_meta)
        blocks = [block.module for block in blocks_of(self.model)]
        block_bytes = max((sum(p.nbytes for p in block.parameters()) for block in blocks), default=0)
        require_memory(
            outside_bytes + block_bytes,
            f"Loading {folder} block by block in float32",
            "Use a machine with more memory.",
        )
        tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        # names in the file of the parameters of modules; a shared module is read under one of its names
        self._sources: dict[nn.Module, dict[str, str]] = {}
        for name in in_blocks:
            parent, _, last = name.rpartition(".")
            self._sources.setdefault(self.model.get_submodule(parent), {})[last] = name
        load_weights(self.model, transpose_conv1d_tensors(self.model, tensors), folder)
        self.model.eval()

    def place(self, device: str) -> None:
        """Move the weights in memory to `device`; blocks are loaded there from now on."""
        self._device = device
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)

    @contextmanager
    def loaded(self, block: nn.Module) -> Iterator[None]:
        """Have the weights of `block`, a module of the model, in memory inside the context."""
        sources = {module: self._sources.get(module, {}) for module in block.modules()}
        names = {name for by_parameter in sources.values() for name in by_parameter.values()}
        tensors = transpose_conv1d_tensors(self.model, {name: self._read(name) for name in names})
        empty = {module: dict(module.named_parameters(recurse=False)) for module in sources}
        for module, by_parameter in sources.items():
            for parameter, name in by_parameter.items():
                tensor = tensors[name].to(self._device)
                value = tensor.float() if tensor.is_floating_point() else tensor
                setattr(module, parameter, nn.Parameter(value, requires_grad=False))
        del tensors
        try:
            yield
        finally:
            for module, by_parameter in sources.items():
                for parameter in by_parameter:
                    setattr(module, parameter, empty[module][parameter])
                if isinstance(module, QuantizedMatrix):
                    module.clear_cache()
            trim_memory()

    def _names_in_blocks(self) -> set[str]:
        """Return the names in the file of parameters that only blocks have."""
        prefixes = tuple(f"{block.stack.module_path}." for block in blocks_of(self.model))
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        outside = {id(p) for name, p in parameters.items() if not name.startswith(prefixes) or name in tied}
        outside |= {id(parameters[name]) for name in tied.values() if name in parameters}
        return {name for name, p in parameters.items() if name in self._files and id(p) not in outside}

    def _read(self, name: str) -> Tensor:
        path, stored_name = self._files[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        return tensor
