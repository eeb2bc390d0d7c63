"""ZeRO of DeepSpeed: optimizer states, gradients and parameters divided over the processes of a training.

Stage 1 divides the optimizer states, stage 2 also the gradients, stage 3 also the parameters (Rajbhandari et
al. 2020, ZeRO, arXiv:1910.02054). Trainer starts it with the optimizer of the recipe: DeepSpeed's own would
be compiled. DeepSpeed's checkpoints are pickled, so none are written.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from smelt.core.process_group import process_rank
from smelt.training.processes import LaunchSettings
from smelt.training.sharding import DividedWeights

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


class ZeroWeights(DividedWeights):
    """Weights that DeepSpeed trains.

    Of parameters that stage 3 divides, process 0 reads and writes whole ones, and the others nothing.
    """

    supports_resume = False

    def __init__(self, module: nn.Module, launch: LaunchSettings, device: torch.device) -> None:
        import deepspeed

        super().__init__(module)
        self.is_divided, self._gathered = launch.zero_stage == 3, deepspeed.zero.GatheredParameters
        # one for every exchange: torch 2.13 renames the functions that DeepSpeed calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        if device.type == "cpu":
            # otherwise it compiles a C++ extension for all-reduce in shared memory
            vars(deepspeed.ops)["__compatible_ops__"] = {}

    def begin(self) -> None:
        """Keep transformers from dividing the models that checkpoints are scored with."""
        unset_hf_deepspeed_config()

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of a parameter or buffer on the CPU, of a divided one in process 0 alone."""
        if not self._divides(tensor):
            return super().read(tensor)
        gathered = self.gather(tensor)
        return gathered if process_rank() == 0 else gathered.new_empty(0)

    def write(self, tensor: Tensor, part: Tensor) -> None:
        """Set a parameter or buffer; a divided one to the `part` of process 0."""
        if not self._divides(tensor):
            super().write(tensor, part)
            return
        with self._gathered([tensor], modifier_rank=0):
            if process_rank() == 0:
                super().write(tensor, part)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor on the CPU, which shares no memory with `tensor`."""
        if not self._divides(tensor):
            return super().read(tensor)
        with self._gathered([tensor]):
            return super().read(tensor)

    def restore(self) -> None:
        """Make the module an ordinary one again, with whole weights on the CPU, in each process."""
        super().restore()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)

    def _divides(self, tensor: Tensor) -> bool:
        return self.is_divided and isinstance(tensor, nn.Parameter)
