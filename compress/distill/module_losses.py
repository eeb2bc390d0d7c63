"""Loss on the outputs of modules that the user pairs by name: the hints of FitNets.

Shapes: B = batch, C = channels, L = tokens of the longest text, other axes are positions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.distill.check_config import unknown_module_error
from smelt.core.errors import InputError
from smelt.tasks.samples import TOKEN_MASK_KEY
from smelt.training.extension import LossTerm

_TERM = "hidden_states"


class ChannelProjection(nn.Module):
    """A linear map of one axis of a tensor, without bias; of channels a 1x1 convolution.

    A regressor of hints: Romero et al. 2015, FitNets, arXiv:1412.6550, section 2.2.
    """

    def __init__(self, axis: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.axis, self.linear = axis, nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with `outputs` entries on the axis."""
        projected: Tensor = self.linear(x.movedim(self.axis, -1)).movedim(-1, self.axis)
        return projected


class ModuleLosses:
    """Captures the outputs of named modules of a student and its teacher, and compares them.

    The interface is that of `InnerLosses`. The loss of a pair is the mean squared difference of all entries,
    as torch's MSELoss in torchdistill and in RepDistiller's HintLoss; of texts, of all entries at tokens, so
    that it does not depend on padding.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        weight: float,
        pairs: Mapping[str, str],
        inputs: Mapping[str, Tensor],
        seed: int = 0,
        *,
        mean_over_layers: bool = False,
    ) -> None:
        """Run both models once; pairs of different widths get a projection (initialized with `seed`).

        Args:
            student: the trained model.
            teacher: in eval mode.
            weight: of the loss.
            pairs: names of the student's modules, and the teacher's of each.
            inputs: of two samples, valid for both models.
            seed: of the projections.
            mean_over_layers: the loss is divided by the number of pairs.

        Raises:
            InputError: a module does not exist or is not called once, or shapes differ in positions.
        """
        self.models, self.weight, self.pairs = {"student": student, "teacher": teacher}, weight, dict(pairs)
        self.divisor = len(pairs) if mean_over_layers else 1
        self.captured: dict[str, dict[str, Tensor]] = {"student": {}, "teacher": {}}
        names = {"student": [*self.pairs], "teacher": [*dict.fromkeys(self.pairs.values())]}
        self.names: Mapping[str, list[str]] = names
        for role, model in self.models.items():
            known = dict(model.named_modules())
            for name in names[role]:
                if name not in known:
                    raise _error("unknown-module", unknown_module_error(role, name, known))
        shapes = {role: self._output_shapes(role, inputs) for role in self.models}
        self.token_axes = self._token_axes(shapes["student"], inputs)
        self.modules: dict[str, nn.Module] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for index, (name, teacher_name) in enumerate(self.pairs.items()):
                ours, theirs = shapes["student"][name], shapes["teacher"][teacher_name]
                if ours != theirs:
                    axis = _projected_axis(name, ours, teacher_name, theirs)
                    projection = ChannelProjection(axis, ours[axis], theirs[axis])
                    self.modules[f"projection_{index}"] = projection

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture outputs of both models inside the context."""
        with contextlib.ExitStack() as undo:
            for role, model in self.models.items():
                for name in self.names[role]:
                    hook = partial(self._keep, role=role, name=name)
                    undo.callback(model.get_submodule(name).register_forward_hook(hook).remove)
            undo.callback(self.clear)
            yield

    def _keep(self, _: Any, inputs: Any, output: Any, role: str, name: str) -> None:
        self.captured[role][name] = _first_tensor(output).clone()  # the next module may work in place

    def clear(self) -> None:
        """Clear the tensors of the last batch."""
        for tensors in self.captured.values():
            tensors.clear()

    def loss_terms(self, batch: Mapping[str, Tensor]) -> dict[str, LossTerm]:
        """Return the weighted loss of the batch that both models have just processed, by name."""
        total: Tensor | None = None
        for index, (name, teacher_name) in enumerate(self.pairs.items()):
            project = self.modules.get(f"projection_{index}", nn.Identity())
            output = project(self.captured["student"][name]).float()
            target, axis = self.captured["teacher"][teacher_name].detach().float(), self.token_axes.get(name)
            token_mask = batch.get(TOKEN_MASK_KEY, batch.get("attention_mask"))
            if axis is not None and token_mask is not None:
                mask = token_mask.bool()
                output, target = (states.movedim(axis, 1)[mask] for states in (output, target))
            distance = F.mse_loss(output, target)
            total = distance if total is None else total + distance
        assert total is not None
        return {_TERM: LossTerm(self.weight * total / self.divisor, "inputs")}

    def _token_axes(self, shapes: Mapping[str, list[int]], inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the axis of tokens of each of the student's modules whose output has one.

        It is the one whose size is the number of tokens, for texts of two lengths.

        Args:
            shapes: of the outputs for `inputs`.
            inputs: of two samples.
        """
        if "input_ids" not in inputs:
            return {}
        length = inputs["input_ids"].shape[1]
        shorter = {name: value[:, :-1] for name, value in inputs.items()}
        axes = {}
        for name, sizes in self._output_shapes("student", shorter).items():
            for axis, (size, long_size) in enumerate(zip(sizes, shapes[name], strict=True)):
                if (size, long_size) == (length - 1, length):
                    axes[name] = axis
        return axes

    @torch.no_grad()
    def _output_shapes(self, role: str, inputs: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return the shape of the output of each named module of a model."""
        model, calls, shapes = self.models[role], Counter[str](), {}
        with contextlib.ExitStack() as undo:
            for name in self.names[role]:

                def read(_: Any, inputs: Any, output: Any, name: str) -> None:
                    calls[name] += 1
                    tensor = _first_tensor(output)
                    shapes[name] = list(tensor.shape) if isinstance(tensor, Tensor) else []

                hook = partial(read, name=name)
                undo.callback(model.get_submodule(name).register_forward_hook(hook).remove)
            was_training = model.training
            device = next(model.parameters()).device
            model.eval()(**{name: value.to(device) for name, value in inputs.items()})
            model.train(was_training)
        for name in self.names[role]:
            if calls[name] != 1:
                text = (
                    f"the {role}'s '{name}' is called {calls[name]} times in a forward pass. Name a module"
                    " that is called once."
                )
                raise _error("not-called-once", text)
            if not shapes[name]:
                text = f"the output of the {role}'s '{name}' is no tensor. Name a module that returns one."
                raise _error("wrong-output", text)
        return shapes


def _first_tensor(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _projected_axis(name: str, ours: list[int], teacher_name: str, theirs: list[int]) -> int:
    """Return the one axis in which two shapes differ: that of channels (1), or the last.

    Raises:
        InputError: `shape-mismatch`: they differ in others.
    """
    axes = [axis for axis, sizes in enumerate(zip(ours, theirs, strict=False)) if sizes[0] != sizes[1]]
    if len(ours) == len(theirs) and len(axes) == 1 and axes[0] in (1, len(ours) - 1):
        return axes[0]
    raise _error(
        "shape-mismatch",
        f"'{name}' of the student returns {ours} for two samples, '{teacher_name}' of the teacher {theirs}."
        " Only the number of channels may differ; pair modules with the same positions: height and width, or"
        " tokens.",
    )


def _error(code: str, text: str) -> InputError:
    return InputError(f"distill: layer_map: {text}", code=code, setting="layer_map")
