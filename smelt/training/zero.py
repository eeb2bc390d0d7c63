"""ZeRO of DeepSpeed: optimizer states, gradients and parameters divided over the processes of a training.

Stage 1 divides the optimizer states, stage 2 also the gradients, stage 3 also the parameters (Rajbhandari et
al. 2020, ZeRO, arXiv:1910.02054). Trainer starts it before the first update, with the optimizer of the
recipe: DeepSpeed's own would be compiled. The files of a training are smelt's: nothing is unpickled, and a
training resumes with any number of processes and any strategy.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from smelt.training.extension import ParameterGroup
from smelt.training.processes import LaunchSettings
from smelt.training.sharding import ModuleState, buffers_on_cpu, divided_like, in_first, whole_tensor

# Values that are exchanged at once, 20 MB; DistributedDataParallel exchanges 25 MiB. Buffers of DeepSpeed's
# default, 500 million, take more memory than ZeRO saves (docs/measurements/deepspeed.md).
_BUCKET = 5_000_000


def zero_config(launch: LaunchSettings, model: nn.Module) -> dict[str, Any]:
    """Return the settings that Trainer passes to DeepSpeed.

    Precision, optimizer and schedule are the stage's, which Trainer creates.
    """
    bucket = min(sum(p.numel() for p in model.parameters() if p.requires_grad), _BUCKET)
    config: dict[str, Any] = {
        "stage": launch.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,  # DeepSpeed requires an even one
        **launch.zero_options,
    }
    if launch.cpu_offload:
        config["offload_optimizer"] = {"device": "cpu"}
    if launch.zero_stage == 3:
        # no parameter stays whole after it was used: weights are exchanged between updates
        config |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        if launch.cpu_offload:
            config["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": config,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def prepare_accelerate() -> None:
    """Let accelerate, and Trainer, use DeepSpeed on a CPU, which accelerate starts on GPUs only."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED


@contextlib.contextmanager
def deepspeed_unused() -> Iterator[None]:
    """Keep accelerate from importing DeepSpeed inside the context: that takes seconds, and may fail."""
    from accelerate.utils import other

    is_available = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = is_available


class ZeroModel(transformers.TrainerCallback):  # type: ignore[misc]
    """The state of a module that DeepSpeed divides from the beginning of the training; see `divided_by_zero`.

    stage: of ZeRO; 3 divides the parameters too.
    """

    def __init__(self, module: nn.Module, launch: LaunchSettings, device: torch.device) -> None:
        self.stage = launch.zero_stage
        self._module = module
        self._states = [ModuleState.of(submodule) for submodule in module.modules()]
        self._attributes = [(p, frozenset(vars(p))) for p in module.parameters()]
        self._trained: list[nn.Parameter] = []
        self._dims: list[int] = []
        self._numbers: list[list[int]] = []  # of the parameters of each group
        self._zero: Any = None
        if device.type == "cpu":
            import deepspeed.ops

            # otherwise it compiles a C++ extension for all-reduce in shared memory
            vars(deepspeed.ops)["__compatible_ops__"] = {}

    @property
    def divides_parameters(self) -> bool:
        """Whether a process holds only its part of the parameters."""
        return self.stage == 3

    def groups(self, groups: Sequence[ParameterGroup]) -> Sequence[ParameterGroup]:
        """Return the groups: their parameters are the same objects when they are divided."""
        return groups

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the order of the parameters of `optimizer`, before DeepSpeed replaces them by vectors."""
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._dims = [p.dim() for p in self._trained]
        numbers = iter(range(len(self._trained)))
        self._numbers = [[next(numbers) for _ in group["params"]] for group in optimizer.param_groups]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep DeepSpeed's optimizer, which holds the parts."""
        self._zero = kwargs["optimizer"].optimizer
        # otherwise transformers would divide the models that checkpoints are scored with
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state dict of an undivided optimizer, with its tensors in process 0 alone.

        All processes must call it.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = self._zero.optimizer
        self._link_states()
        vectors, numbers = _divided_and_common(inner.state)
        state = {
            index: {name: in_first(safe_get_full_optimizer_state(p, name)) for name in vectors} | numbers
            for index, p in enumerate(self._trained)
        }
        groups = zip(inner.param_groups, self._numbers, strict=True)
        return {"state": state, "param_groups": [{**group, "params": numbers} for group, numbers in groups]}

    def load_optimizer_state(
        self, state: Mapping[int, Mapping[str, Tensor]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load the state of an undivided optimizer, by the number of the parameter."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        zero, inner = self._zero, self._zero.optimizer
        for group, saved in zip(inner.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        example = next(iter(state.values()), {})
        names = [
            n
            for n in example
            if all(parameter_state[n].dim() == self._dims[index] for index, parameter_state in state.items())
        ]
        vectors = (
            "fp32_partitioned_groups_flat" if self.divides_parameters else "single_partition_of_fp32_groups"
        )
        for vector in getattr(zero, vectors) if example else ():
            # fused AdamW needs the number of steps where its parameters are
            fused = any(group.get("fused") for group in inner.param_groups)
            common = {
                name: tensor.to(vector.device if fused else tensor.device, copy=True)
                for name, tensor in example.items()
                if name not in names
            }
            inner.state[vector] = common | {name: torch.zeros_like(vector) for name in names}
        self._link_states()
        for index, parameter_state in state.items():  # a parameter that was never used has none
            parameter = self._trained[index]
            for name in names:
                full_tensor = parameter_state[name]
                if self.divides_parameters:
                    safe_set_local_optimizer_state(parameter, divided_like(full_tensor, parameter), name)
                else:
                    safe_set_full_optimizer_state(parameter, full_tensor.to(parameter.device), name)

    def _link_states(self) -> None:
        """Let DeepSpeed find the state of every parameter.

        Stages 1 and 2 do it after the first update of the first parameter group, when others have none.
        """
        if not self.divides_parameters:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    @contextlib.contextmanager
    def whole(self, part: nn.Module | None = None) -> Iterator[None]:
        """Hold whole parameters inside the context, in stage 3 on the CPU; changes of them are lost.

        All processes must enter it, with no computation of the model running. part: only those of this part.
        """
        if not self.divides_parameters or self._zero is None:
            yield
            return
        chosen_module = self._module if part is None else part
        parameters = list(chosen_module.parameters())
        device = parameters[0].device if parameters else torch.device("cpu")
        self._gather(parameters)
        try:
            with buffers_on_cpu(chosen_module.modules()):
                yield
        finally:
            for parameter in parameters:
                parameter.data = parameter.data.new_empty(0, device=device)

    def restore(self) -> None:
        """Make the modules ordinary ones again, with the trained parameters, on the CPU."""
        parameters = [p for p, _ in self._attributes]
        if self.divides_parameters and self._zero is not None:
            self._gather(parameters)
        for parameter in parameters:
            parameter.data = parameter.data.to("cpu", copy=True)  # not a view of DeepSpeed's buffers
        self.release()

    def release(self) -> None:
        """Remove what DeepSpeed has added to modules, parameters and the environment."""
        if self._zero is not None:
            with contextlib.suppress(Exception):  # after an error on a GPU it raises that again
                self._zero.destroy()
        for state in self._states:
            state.restore()
        for parameter, before in self._attributes:
            for name in vars(parameter).keys() - before:
                delattr(parameter, name)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()

    @torch.no_grad()
    def _gather(self, parameters: Sequence[nn.Parameter]) -> None:
        self._zero.parameter_offload.empty_partition_cache()
        for parameter in parameters:
            parameter.data = whole_tensor(parameter).to("cpu")


@contextlib.contextmanager
def divided_by_zero(module: nn.Module, launch: LaunchSettings, device: torch.device) -> Iterator[ZeroModel]:
    """Let DeepSpeed divide the training of `module` inside the context.

    At the end the modules are ordinary ones again, and the parameters the same objects as before, with the
    trained values, on the CPU, in each process.
    """
    with warnings.catch_warnings():
        # one for every exchange: torch 2.13 renames the functions that DeepSpeed calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        zero_model = ZeroModel(module, launch, device)
        try:
            yield zero_model
        except BaseException:
            zero_model.release()  # the others may have failed too, so nothing can be gathered
            raise
        zero_model.restore()


def _divided_and_common(state: Mapping[Tensor, Mapping[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the vectors in the state of an optimizer, and the values that are none."""
    for vector, values in state.items():
        names = [n for n, v in values.items() if isinstance(v, Tensor) and v.shape == vector.shape]
        return names, {n: v for n, v in values.items() if n not in names and v is not None}
    return [], {}
