"""A tiny model of each family of the registry, loaded, and its input: what tables are compared with."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.models.checkpoint import load_model
from tests.support.models import every_family, seq2seq

NAMES = sorted(every_family.TEXT_FAMILIES)
MAKERS = {name: functools.partial(every_family.make_model, family=name) for name in NAMES}
MAKERS["t5"] = seq2seq.write_t5  # v1.0, which has no gate


def load(name: str, **config: Any) -> Any:
    """Return a tiny model of the family with attention in plain products, every parameter drawn widely.

    Norms too: as they are made, all of them multiply with one, and none could be told from another.
    """
    return copy.deepcopy(_load_cached(name, tuple(config.items())))


@functools.cache
def _load_cached(name: str, config: tuple[tuple[str, Any], ...]) -> Any:
    folder = Path(tempfile.mkdtemp(prefix=f"smelt-{name}-"))
    try:
        MAKERS[name](folder / "model", **dict(config))
        model: Any = load_model(folder / "model")[0]
    finally:
        shutil.rmtree(folder)
    model.set_attn_implementation("eager")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand(parameter.shape, generator=draw) * 0.6 - 0.2)
    return model


def example_batch(model: Any) -> dict[str, Tensor]:
    """Return three texts of 7 tokens, none of them padding."""
    draw = torch.Generator().manual_seed(2)
    size = min(model.config.vocab_size, 40)
    batch = {"input_ids": torch.randint(5, size - 4, (3, 7), generator=draw)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(5, size - 4, (3, 5), generator=draw)
    return batch


def run_model(model: Any, batch: dict[str, Tensor], **more: Any) -> Any:
    """Return what the model gives, computed without a cache."""
    cache = (
        {"use_cache": False}
        if every_family.TEXT_FAMILIES[model.config.model_type].architecture != "encoder"
        else {}
    )
    return model(**batch, **cache, **more)


def dependency_graph(model: Any) -> Any:
    """Return torch-pruning's dependency graph of `model` (Fang et al. 2023, arXiv:2301.12900)."""
    import torch_pruning

    for parameter in model.parameters():  # it follows gradients
        parameter.requires_grad_(True)
    return torch_pruning.DependencyGraph().build_dependency(
        model, example_batch(model), forward_fn=lambda m, batch: run_model(m, batch).logits, verbose=False
    )


def pruning_group(dependencies: Any, model: Any, root: str) -> set[tuple[str, int]]:
    """Return the axes, (tensor, dim), that torch-pruning cuts with the rows of the layer called `root`."""
    import torch_pruning

    layer = model.get_submodule(root)
    rows = list(range(layer.out_features))
    pruned: set[tuple[str, int]] = set()
    for dependency, _ in dependencies.get_pruning_group(layer, torch_pruning.prune_linear_out_channels, rows):
        module = dependency.target.module
        if isinstance(module, torch.nn.Parameter):
            pruned.add((first_parameter_name(model, module), module.dim() - 1))
            continue
        tensors = [getattr(module, name, None) for name in ("weight", "bias")]
        weight, bias = (t if isinstance(t, torch.nn.Parameter) else None for t in tensors)
        gives = dependencies.is_out_channel_pruning_fn(dependency.handler)
        if weight is not None:
            across = isinstance(module, torch.nn.Embedding) or not gives
            pruned.add((first_parameter_name(model, weight), 1 if across and weight.dim() == 2 else 0))
        if bias is not None and gives:
            pruned.add((first_parameter_name(model, bias), 0))
    return pruned


def first_parameter_name(model: Any, tensor: Tensor) -> str:
    """Return the first name of a parameter of `model`."""
    return next(name for name, parameter in model.named_parameters() if parameter is tensor)
