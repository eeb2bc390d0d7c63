"""Modules whose parameters FSDP or DeepSpeed divides: their state before, and their buffers on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip
_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")


@dataclass(frozen=True)
class ModuleState:
    """Its class, the mapping of its parameters, the names of its attributes, the keys of its hooks."""

    module: nn.Module
    kind: type
    parameters: dict[str, nn.Parameter | None]
    attributes: frozenset[str]
    hooks: dict[str, frozenset[int]]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Return the present state of `module`."""
        hooks = {name: frozenset(getattr(module, name)) for name in (*_HOOKS, *_HOOK_OPTIONS)}
        return cls(module, type(module), module._parameters, frozenset(vars(module)), hooks)

    def restore(self) -> None:
        """Restore class and mapping, and remove attributes and hooks that were added."""
        from torch.distributed._composable_state import _module_state_mapping

        module, left = self.module, vars(self.module)
        module.__class__ = self.kind
        module._parameters = self.parameters
        for name in left.keys() - self.attributes:
            del left[name]
        for name, before in self.hooks.items():
            hooks: Any = getattr(module, name)
            for key in hooks.keys() - before:
                del hooks[key]
        _module_state_mapping.pop(module, None)  # else FSDP cannot divide the module again


@contextlib.contextmanager
def buffers_on_cpu(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Hold the buffers of `modules` on the CPU inside the context, next to whole parameters."""
    before = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    for owner, name, buffer in before:
        owner._buffers[name] = buffer.cpu()
    try:
        yield
    finally:
        for owner, name, buffer in before:
            owner._buffers[name] = buffer
