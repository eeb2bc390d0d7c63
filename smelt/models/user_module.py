"""PyTorch modules of the user's own: the model that calls one, and its first folder.

A module is built by a function in the user's own code. Its code is imported from the user's cache, by its
hash (`smelt.core.user_code`), never from the folder of a model.

Shapes: B = batch, L = tokens, C = classes, h, w = height and width of the images, N = values of all outputs
of a sample.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention, SequenceClassifierOutput

from smelt.core.errors import InputError, RunError, did_you_mean
from smelt.core.user_code import first_on_path, import_current, recorded_source, user_code_errors
from smelt.models.families.family import MODULE_PREFIX
from smelt.models.families.torch_module import ARRAYS_FAMILY, IMAGES_FAMILY, TEXT_FAMILY
from smelt.models.layers import LowRankConv


class UserModuleConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """The config of a user's module.

    module: the function that builds it, `package.module:function`. source_hash: of its code. num_channels: of
    the images. fixed_layers: linear layers and convolutions that cannot be replaced, as
    in `TrialRun`. linear_layers, convolutions: how many others there
    are, without the output layer.
    """

    model_type = IMAGES_FAMILY.name
    module: str = ""
    source_hash: str = ""
    num_channels: int = 3
    fixed_layers: list[str] | None = None
    linear_layers: int = 0
    convolutions: int = 0


class UserModuleArraysConfig(UserModuleConfig):
    """The config of a user's module whose inputs and outputs are arrays.

    inputs: for each its dtype and the sizes of a sample, without the batch. outputs: their names.
    output_layers: the linear layers whose outputs they are.
    """

    model_type = ARRAYS_FAMILY.name
    inputs: dict[str, list[Any]] | None = None
    outputs: list[str] | None = None
    output_layers: list[str] | None = None


class UserModuleTextConfig(UserModuleConfig):
    """The config of a user's module that classifies texts. vocab_size: tokens of its tokenizer."""

    model_type = TEXT_FAMILY.name
    vocab_size: int = 0


class _UserModule(transformers.PreTrainedModel):  # type: ignore[misc]
    """A model that calls a user's module.

    Raises:
        InputError: as `build_module`.
    """

    base_model_prefix = MODULE_PREFIX
    _no_split_modules: ClassVar[list[str]] = []

    def __init__(self, config: UserModuleConfig) -> None:
        super().__init__(config)
        setattr(self, MODULE_PREFIX, build_module(config.module, config.source_hash))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the values that the user's code sets."""

    def _call(self, inputs: str, *tensors: Tensor, **named: Tensor) -> Any:
        """Return the output of the user's module. inputs: what they are, for messages.

        Raises:
            RunError: `module-failed`: the user's code raised an error. While torch exports the model, torch's
                own errors are passed on.
        """
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (*tensors, *named.values()))
        problem = f"'{self.config.module}' fails on {inputs} {shapes}"
        exports = torch.compiler.is_compiling()  # torch handles some errors itself
        with nullcontext() if exports else user_code_errors(problem, RunError):
            return getattr(self, MODULE_PREFIX)(*tensors, **named)


class UserModuleForImageClassification(_UserModule):
    """A classifier of images whose logits are the output of a user's module."""

    config_class = UserModuleConfig
    main_input_name = "pixel_values"

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **_: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """Return the logits, float [B, C], and the loss with labels, for pixels float [B, 3, h, w].

        Raises:
            RunError: as `_call`.
        """
        logits = self._call("images", pixel_values)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


class UserModuleForSequenceClassification(_UserModule):
    """A classifier of texts whose logits are the output of a user's module."""

    config_class = UserModuleTextConfig

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Return the logits, float [B, C], and the loss with labels, for tokens and their mask, int64 [B, L].

        Without a mask all tokens count.

        Raises:
            RunError: as `_call`.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self._call("tokens and mask", input_ids, mask)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


@dataclass(frozen=True)
class ArraysOutput:
    """The outputs of a module by name, each [B, ...], and all of them in one tensor, float [B, N]."""

    arrays: dict[str, Tensor]
    logits: Tensor


class UserModuleForArrays(_UserModule):
    """A user's module with arrays as inputs and outputs."""

    config_class = UserModuleArraysConfig

    def forward(self, **inputs: Tensor) -> ArraysOutput:
        """Return the outputs for the inputs of the config, each [B, ...].

        Raises:
            RunError: as `_call`; `wrong-output`: the outputs have other names than in the plan.
        """
        named = {name: inputs[name] for name in self.config.inputs}
        outputs = named_outputs(self._call(f"arrays {', '.join(named)}", **named))
        if [*outputs] != self.config.outputs:
            raise RunError(
                f"'{self.config.module}' returned the outputs {', '.join(outputs)}, but"
                f" {', '.join(self.config.outputs)} when the recipe was checked. Return the same ones for all"
                " inputs.",
                code="wrong-output",
            )
        # flatten(1) fails on outputs [B]; len() would fix the batch size of an exported graph
        matrices = [value.reshape(value.shape[0], -1) for value in outputs.values()]
        return ArraysOutput(outputs, torch.cat(matrices, dim=1))

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """Return inputs: normally distributed numbers, and zeros as integers, which are valid indices."""
        generator = torch.Generator().manual_seed(0)
        examples = {}
        for name, (dtype, *sizes) in self.config.inputs.items():
            kind = getattr(torch, dtype)
            shape = (batch_size, *sizes)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
            examples[name] = drawn.to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)
        return examples


def named_outputs(output: Any) -> dict[str, Tensor]:
    """Return the tensors that a module returned by name: `output` of one, `output_0` and so on of several.

    A dictionary has its own names.
    """
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple | list):
        return {f"output_{index}": value for index, value in enumerate(output)}
    return {"output": output}


USER_MODULE_CLASSES: dict[str, type[_UserModule]] = {
    each.__name__: each
    for each in (UserModuleForImageClassification, UserModuleForSequenceClassification, UserModuleForArrays)
}
for _config_class in (UserModuleConfig, UserModuleArraysConfig, UserModuleTextConfig):
    transformers.AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)


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


@dataclass(frozen=True)
class TrialRun:
    """One run of a user's module: what it returned, and its layers by name.

    fixed_layers: linear layers and convolutions that cannot be replaced. Those that were not called: their
        weights are read by another module (`nn.MultiheadAttention` reads those of `out_proj`), or unused. And
        those of a subclass, which computes something else.
    output_layers: linear layers whose output is one of the module's.
    """

    output: Any
    fixed_layers: list[str]
    output_layers: list[str]


def run_once(network: nn.Module, *inputs: Tensor, **named: Tensor) -> TrialRun:
    """Run `network` without gradients, and observe its layers."""
    layers = {m: name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    results: dict[nn.Module, Any] = {}
    hooks = [m.register_forward_hook(lambda module, _, y: results.update({module: y})) for m in layers]
    try:
        with torch.no_grad():
            output = network(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
    replaceable = {module for module in results if type(module) in (nn.Linear, nn.Conv2d)}
    outputs = [id(value) for value in named_outputs(output).values()]
    ends = [n for m, n in layers.items() if isinstance(m, nn.Linear) and id(results.get(m)) in outputs]
    return TrialRun(output, [name for m, name in layers.items() if m not in replaceable], ends)


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
    if isinstance(model.config, UserModuleArraysConfig):
        return {*fixed_layers(model), *map(model.get_submodule, model.config.output_layers or ())}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    output_layers = [layer for layer in layers if layer.out_features == model.config.num_labels]
    return {*fixed_layers(model), *output_layers[-1:]}


def fixed_layers(model: Any) -> Collection[nn.Module]:
    """Return the layers that cannot be replaced, because another module reads their weights."""
    names = getattr(model.config, "fixed_layers", None) or ()
    attentions = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    return {model.get_submodule(name) for name in names} | {a.out_proj for a in attentions}
