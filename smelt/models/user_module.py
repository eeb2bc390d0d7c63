"""PyTorch modules of the user's own: the model that calls one, and its first folder.

A module is built by a function in the user's own code. Its code is imported from the user's cache, by its
hash (`smelt.core.user_code`), never from the folder of a model.

Shapes: B = batch, C = classes, h, w = height and width of the images.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Collection
from contextlib import redirect_stdout
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from smelt.core.errors import InputError, RunError, did_you_mean
from smelt.core.user_code import first_on_path, import_current, recorded_source, user_code_errors
from smelt.models.families.family import MODULE_PREFIX
from smelt.models.families.torch_module import FAMILY
from smelt.models.layers import LowRankConv


class UserModuleConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """The config of a user's module.

    module: the function that builds it, `package.module:function`. source_hash: of its code. num_channels: of
    the images. fixed_layers: linear layers and convolutions that cannot be replaced, as
    `find_fixed_layers`. linear_layers, convolutions: how many others there
    are, without the output layer.
    """

    model_type = FAMILY.name
    module: str = ""
    source_hash: str = ""
    num_channels: int = 3
    fixed_layers: list[str] | None = None
    linear_layers: int = 0
    convolutions: int = 0


class UserModuleForImageClassification(transformers.PreTrainedModel):  # type: ignore[misc]
    """A classifier of images whose logits are the output of a user's module.

    Raises:
        InputError: as `build_module`.
    """

    config_class = UserModuleConfig
    base_model_prefix = MODULE_PREFIX
    main_input_name = "pixel_values"
    _no_split_modules: ClassVar[list[str]] = []

    def __init__(self, config: UserModuleConfig) -> None:
        super().__init__(config)
        setattr(self, MODULE_PREFIX, build_module(config.module, config.source_hash))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the values that the user's code sets."""

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **_: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """Return the logits, float [B, C], and the loss with labels, for pixels float [B, 3, h, w].

        Raises:
            RunError: `module-failed`: the user's code raised an error. While torch exports the model, torch's
                own errors are passed on.
        """
        network = getattr(self, MODULE_PREFIX)
        if torch.compiler.is_compiling():  # also exporting; torch handles some errors itself
            logits = network(pixel_values)
        else:
            problem = f"'{self.config.module}' fails on images {list(pixel_values.shape)}"
            with user_code_errors(problem, RunError):
                logits = network(pixel_values)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


USER_MODULE_CLASSES = {UserModuleForImageClassification.__name__: UserModuleForImageClassification}
transformers.AutoConfig.register(FAMILY.name, UserModuleConfig, exist_ok=True)


def build_module(module: str, source_hash: str) -> nn.Module:
    """Return the module that the function `module` builds, in float32 and eval mode, on the CPU.

    Raises:
        InputError: `untrusted-module`: as `recorded_source`; `module-failed`: the code raises an error, or
            does not return a module of torch.
    """
    name, _, attribute = module.partition(":")
    source = recorded_source(module, source_hash)
    # standard output has results, such as JSON
    with first_on_path(source), torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
        with user_code_errors(f"'{name}' cannot be imported"):
            loaded = import_current(name, source)
        if not hasattr(loaded, attribute):
            functions = [n for n, value in vars(loaded).items() if inspect.isfunction(value)]
            functions = [n for n in functions if getattr(loaded, n).__module__ == name]
            listed = ", ".join(functions[:20]) or "none"
            raise InputError(
                f"the module '{name}' has no '{attribute}'. Its functions: {listed}."
                f"{did_you_mean(attribute, functions)}",
                code="module-failed",
            )
        with user_code_errors(f"'{module}', called without arguments, cannot build the model"):
            network = getattr(loaded, attribute)()
    if not isinstance(network, nn.Module):
        raise InputError(
            f"'{module}' returned a {type(network).__name__}. Return a torch.nn.Module.", code="module-failed"
        )
    return network.float().eval()


def empty_user_module(model_class: Any, config: Any) -> Any:
    """Return a model whose parameters are on the meta device; buffers have the values of the user's code."""
    model = model_class(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module.register_parameter(name, empty)
    return model


def find_fixed_layers(network: nn.Module, pixels: Tensor) -> tuple[Tensor, list[str]]:
    """Run `network` once; return its output, and the linear layers and convolutions that cannot be replaced.

    Those that were not called: their weights are read by another module (`nn.MultiheadAttention` reads those
    of `out_proj`), or unused. And those of a subclass, which computes something else.
    """
    layers = {m: name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    called: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda module, *_: called.add(module)) for m in layers]
    try:
        with torch.no_grad():
            output = network(pixels)
    finally:
        for handle in handles:
            handle.remove()
    replaceable = {module for module in called if type(module) in (nn.Linear, nn.Conv2d)}
    return output, [name for module, name in layers.items() if module not in replaceable]


class _LayerTracer(torch.fx.Tracer):
    """Traces the user's code, but not torch's and smelt's layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LowRankConv) or super().is_leaf_module(m, module_qualified_name)


def traced_conv_norms(model: Any) -> list[tuple[str, str]]:
    """Return the names of each convolution and the batch norm that alone uses its output.

    They are found by torch.fx; none in code that it cannot trace, such as control flow that depends on
    values.
    """
    network = getattr(model, MODULE_PREFIX)
    try:
        nodes = list(_LayerTracer().trace(network).nodes)
    except Exception:
        return []
    calls = Counter(node.target for node in nodes if node.op == "call_module")
    modules = dict(network.named_modules())
    pairs = []
    for node in nodes:
        users = list(node.users)
        if node.op != "call_module" or len(users) != 1 or users[0].op != "call_module":
            continue
        convolution, norm = modules[node.target], modules[users[0].target]
        if (
            type(convolution) in (nn.Conv2d, LowRankConv)
            and type(norm) is nn.BatchNorm2d
            and norm.affine
            and norm.track_running_stats
            and calls[node.target] == calls[users[0].target] == 1
        ):
            pairs.append((f"{MODULE_PREFIX}.{node.target}", f"{MODULE_PREFIX}.{users[0].target}"))
    return pairs


def inner_linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a user's module that can be changed, by name; not the output layer."""
    excluded_layers = kept_linear_layers(model)
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m not in excluded_layers}


def kept_linear_layers(model: Any) -> Collection[nn.Module]:
    """Return the fixed layers of a user's module, and its output layer; none of other models.

    In a model of transformers the output layer is known by its name, which settings exclude.
    """
    if not isinstance(model.config, UserModuleConfig):
        return ()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    output_layers = [layer for layer in layers if layer.out_features == model.config.num_labels]
    return {*fixed_layers(model), *output_layers[-1:]}


def fixed_layers(model: Any) -> Collection[nn.Module]:
    """Return the layers of a user's module that cannot be replaced; none of other models."""
    return {model.get_submodule(name) for name in getattr(model.config, "fixed_layers", None) or ()}
