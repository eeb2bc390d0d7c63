"""One run of a tiny model: which modules are called, and which outputs flow into which modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smelt.data.tasks import task_traits
from smelt.models.experts import separate_experts
from smelt.models.families.family import Family


class CannotDescribeError(Exception):
    """The model has a part that `Layout` has no words for."""


class Trace:
    """One run of a tiny model.

    calls: names of the linear layers, norms and tables that were called, in order. names: the first name of
    each module. all_calls: of every module. inputs, outputs: of each linear layer, norm and table. nodes: of
    the gradient graph of the logits. causal_queries: query layers of attentions to no later token.
    """

    def __init__(self, config: Any, family: Family) -> None:
        torch.manual_seed(0)
        self.config, self.family = config, family
        towers = [tower for tower in family.towers if tower.model_type == config.model_type]
        self.input_kind = towers[0].input_kind if towers else family.input_kind
        if towers:
            self.model: Any = getattr(transformers, towers[0].class_name)._from_config(
                config, attn_implementation="eager"
            )
        else:
            auto_class: Any = getattr(transformers, str(task_traits(family.tasks[0]).auto_class))
            self.model = auto_class.from_config(config, attn_implementation="eager")
        self.model.eval()
        separate_experts(self.model)
        self.names: dict[nn.Module, str] = {module: name for name, module in self.model.named_modules()}
        self.calls: list[str] = []
        self.all_calls: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.causal_queries: set[str] = set()
        self._owners: dict[Any, str] = {}  # by node of the gradient graph, the module whose output it is
        handles = [m.register_forward_hook(self._record, with_kwargs=True) for m in self.names]
        output: Any = self.model(**self._batch(), **self._options())
        if towers:
            pooled = output.pooler_output
            output.logits = output.last_hidden_state if pooled is None else pooled
        self.logits: Tensor = output.logits
        for handle in handles:
            handle.remove()
        self.nodes = list(_reachable(self.logits.grad_fn))
        self._children: dict[Any, list[Any]] = {}
        for node in self.nodes:
            for parent, _ in node.next_functions:
                self._children.setdefault(parent, []).append(node)

    def _batch(self) -> dict[str, Tensor]:
        if self.input_kind == "images":
            side = self.config.to_dict().get("image_size") or 64
            return {"pixel_values": torch.randn(2, 3, side, side)}
        if self.family.input_kind == "audio":
            frames = 2 * self.config.max_source_positions  # the encoder halves their number
            return {
                "input_features": torch.randn(2, self.config.num_mel_bins, frames),
                "decoder_input_ids": torch.randint(5, 60, (2, 5)),
            }
        batch = {"input_ids": torch.randint(5, 60, (2, 7))}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if self.config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.randint(5, 60, (2, 5))
        return batch

    def _options(self) -> dict[str, Any]:
        return {} if self.family.architecture == "encoder" else {"use_cache": False}

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self.names[module]
        self.all_calls.append(name)
        value = output[0] if isinstance(output, tuple) else output
        if not (is_linear(module) or is_norm(module) or is_table(module)) or not isinstance(value, Tensor):
            return
        self.calls.append(name)
        self.inputs[name], self.outputs[name] = (args or tuple(kwargs.values()))[0], value
        if value.grad_fn is not None:
            self._owners[value.grad_fn] = name

    def module(self, name: str) -> Any:
        """Return the module `name`."""
        return self.model.get_submodule(name)

    def sources(self, node: Any) -> tuple[list[str], list[str]]:
        """Return the nearest modules before `node`, and the kinds of the operations between."""
        return self._walk(node, lambda n: [parent for parent, _ in n.next_functions])

    def readers(self, node: Any) -> list[str]:
        """Return the nearest modules after `node`."""
        return self._walk(node, lambda n: self._children.get(n, []), start=False)[0]

    def _walk(
        self, node: Any, step: Callable[[Any], list[Any]], start: bool = True
    ) -> tuple[list[str], list[str]]:
        modules: dict[str, None] = {}
        kinds: list[str] = []
        pending, seen = [node] if start else step(node), set()
        while pending:
            current = pending.pop(0)
            if current is None or current in seen:
                continue
            seen.add(current)
            if current in self._owners:
                modules[self._owners[current]] = None
            else:
                kinds.append(current.name())
                pending += step(current)
        return list(modules), kinds

    def before(self, name: str) -> list[str]:
        """Return the nearest modules before the module `name`."""
        node = next(n for n, owner in self._owners.items() if owner == name)
        sources: dict[str, None] = {}
        for parent, _ in node.next_functions:
            sources |= dict.fromkeys(self.sources(parent)[0])
        return list(sources)

    def product_before(self, softmax: Any) -> Any:
        """Return the product of queries and keys."""
        return self._first_product(softmax, lambda n: [parent for parent, _ in n.next_functions])

    def product_after(self, softmax: Any) -> Any:
        """Return the product of weights and values."""
        return self._first_product(softmax, lambda n: self._children.get(n, []))

    def _first_product(self, node: Any, step: Callable[[Any], list[Any]]) -> Any:
        pending, seen = step(node), set()
        while pending:
            current = pending.pop(0)
            if current is None or current in seen or current in self._owners:
                continue
            seen.add(current)
            if current.name() == "BmmBackward0":
                return current
            pending += step(current)
        raise CannotDescribeError("an attention without a product of queries and keys")


def _reachable(node: Any) -> Iterator[Any]:
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        yield current
        for parent, _ in current.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                pending.append(parent)


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer."""
    return isinstance(module, nn.Linear | Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Return whether `module` is a norm with weights."""
    return "Norm" in type(module).__name__ and hasattr(module, "weight")


def is_table(module: nn.Module) -> bool:
    """Return whether `module` has no other tensor with axes than one table."""
    tensors = [t for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.dim()]
    leaf = not list(module.children()) and not is_linear(module)
    return leaf and len(tensors) == 1 and tensors[0].dim() == 2
