"""The experts of a mixture of experts as separate linear layers, as their checkpoints store them.

transformers stacks the weights of all experts of a block in 3-D parameters: `gate_up_proj` [E, 2 F, D], the
rows of the gate first, and `down_proj` [E, D, F]. In memory each expert has three `nn.Linear` here, so that
stages that change linear layers work on each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Expert(nn.Module):
    """One expert: down_proj(act_fn(gate_proj(x)) * up_proj(x)).

    Args:
        width: D, of the hidden states.
        neurons: F.
        act_fn: the activation function.
    """

    def __init__(self, width: int, neurons: int, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, neurons, bias=False, device="meta")
        self.up_proj = nn.Linear(width, neurons, bias=False, device="meta")
        self.down_proj = nn.Linear(neurons, width, bias=False, device="meta")
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, float [N, D], for the hidden states `x`, float [N, D]."""
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class Experts(nn.ModuleList):
    """The experts of a block. Each computes all tokens; a token adds those that its router selected.

    So shapes do not depend on the routing, and a graph has no operators whose shapes follow from values.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the selected experts' outputs, float [N, D].

        Args:
            hidden_states: float [N, D].
            top_k_index: the selected experts of each token, int64 [N, K].
            top_k_weights: their weights, float [N, K].
        """
        weights = torch.zeros(
            (hidden_states.shape[0], len(self)), dtype=hidden_states.dtype, device=hidden_states.device
        )
        weights = weights.scatter(1, top_k_index, top_k_weights.to(hidden_states.dtype))
        outputs = [expert(hidden_states) * weights[:, index : index + 1] for index, expert in enumerate(self)]
        return torch.stack(outputs).sum(0)


@torch.no_grad()
def separate_experts(model: Any) -> None:
    """Replace stacked experts of `model` by `Experts` with the same weights; works on the meta device."""
    for name, module in list(model.named_modules()):
        if not _is_stacked(module):
            continue
        gates_and_ups, downs = module.gate_up_proj, module.down_proj
        number, width, neurons = downs.shape
        experts = Experts(Expert(width, neurons, module.act_fn) for _ in range(number))
        if not downs.is_meta:
            for index, expert in enumerate(experts):
                gate, up = gates_and_ups[index].chunk(2)
                weights = {"gate_proj": gate, "up_proj": up, "down_proj": downs[index]}
                expert.load_state_dict(
                    {f"{layer}.weight": weight.clone() for layer, weight in weights.items()}, assign=True
                )
                expert.requires_grad_(True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, experts)


def _is_stacked(module: nn.Module) -> bool:
    """Return whether `module` has the stacked weights of experts."""
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
