"""Operations of a model: multiply-adds of matrix multiplications and convolutions, by torch's counter.

`torch.utils.flop_counter.FlopCounterMode` counts a multiplication and an addition as two operations; here a
multiply-add is one. Norms, activations and lookups are in neither. Masked attention scores and weights that
are zero count like others.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from smelt.core.errors import RunError
from smelt.models.edits import replace_module
from smelt.models.empty_model import empty_model
from smelt.models.families.registry import reads_audio, reads_images, reads_images_and_texts
from smelt.models.image_text_model import image_embeds, text_embeds
from smelt.models.text_rules import position_limit
from smelt.models.user_module import UserModuleForArrays
from smelt.quantization.layers import (
    QuantizedActivation,
    QuantizedConv2d,
    QuantizedEmbedding,
    QuantizedLinear,
)

# Codes of a user's module that fails.
MODULE_ERRORS = ("module-failed", "data-dependent-forward")


@torch.no_grad()
def count_operations(model: Any, size: tuple[int, int]) -> int:
    """Return the multiply-adds of one forward pass for one input; nothing is computed.

    Args:
        model: float, in eval mode; it is not changed.
        size: lengths in tokens, of the input and of the decoder's input (unused without a decoder); of an
            image height and width, to which a model of images and texts gets a text as long as its limit;
            not used for arrays, whose config has their sizes.

    Raises:
        RunError: `module-failed`: a user's module raises an error; `data-dependent-forward`: it reads values.
    """
    return _count_on_meta(_copy_on_meta(model), size)


def _count_on_meta(model: Any, size: tuple[int, int]) -> int:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        return _count(model, size)
    except RunError as error:
        if not isinstance(error.__cause__, DataDependentOutputException | DynamicOutputShapeException):
            raise
        raise RunError(
            f"the module's forward depends on the values of its input, and operations are counted without"
            f" values. {error}",
            code="data-dependent-forward",
        ) from error


def _count(model: Any, size: tuple[int, int]) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = "meta"
    counter: Any = FlopCounterMode(display=False)
    # transformers' masks need no values of fake tensors
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        config = model.config.to_dict()
        if reads_images_and_texts(config):
            # an image, and a text of the greatest length
            image_embeds(model, torch.zeros(1, 3, *size, device=device))
            length = position_limit(config) or 1
            text_embeds(model, torch.ones(1, length, dtype=torch.long, device=device))
        elif reads_audio(config):
            frames = 2 * model.config.max_source_positions  # a window has one size
            model(
                torch.zeros(1, model.config.num_mel_bins, frames, device=device),
                decoder_input_ids=torch.ones(1, size[1], dtype=torch.long, device=device),
                use_cache=False,
            )
        elif reads_images(config):
            model(pixel_values=torch.zeros(1, model.config.num_channels, *size, device=device))
        elif isinstance(model, UserModuleForArrays):
            model(**{name: value.to(device) for name, value in model.example_inputs(1).items()})
        else:
            ids, decoder_ids = (torch.ones(1, n, dtype=torch.long, device=device) for n in size)
            options: dict[str, Any] = {"decoder_input_ids": decoder_ids}
            options = options if model.config.is_encoder_decoder else {}
            model(ids, **options, **({"use_cache": False} if model.can_generate() else {}))
    return int(counter.get_total_flops()) // 2


def _copy_on_meta(model: Any) -> Any:
    """Return a copy without weights: some modules keep tensors of a forward pass, here fake ones."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, memo | {id(b): b.to("meta") for b in model.buffers()})


@torch.no_grad()
def count_model_operations(folder: Path, size: tuple[int, int]) -> int:
    """Return the operations of the model in `folder`, as `count_operations`, without reading its weights.

    A quantized layer counts as the float layer that it stands for.

    Raises:
        InputError: config and edits do not define a model.
    """
    model = empty_model(folder)[0].eval().to("meta")
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if (layer := _float_layer(module)) is not None:
            replace_module(model, name, layer)
    return _count_on_meta(model, size)


def _float_layer(module: nn.Module) -> nn.Module | None:
    """Return a float layer of the sizes of a quantized one, on the meta device; None for other modules."""
    if isinstance(module, QuantizedActivation):
        return module.inner
    if isinstance(module, QuantizedEmbedding):
        return nn.Embedding(module.num_embeddings, module.embedding_dim, device="meta")
    has_bias = getattr(module, "bias", None) is not None
    if isinstance(module, QuantizedLinear):
        return nn.Linear(module.in_features, module.out_features, has_bias, device="meta")
    if isinstance(module, QuantizedConv2d):
        _, _, height, width = module.shape
        channels = module.in_channels, module.out_channels
        return nn.Conv2d(*channels, (height, width), bias=has_bias, device="meta", **module.how)
    return None
