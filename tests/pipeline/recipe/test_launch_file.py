"""Processes and strategy from a file of accelerate or of DeepSpeed."""

import json

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from expected_errors import raises_code

from smelt.pipeline.recipe.launch_file import resolve_launch
from smelt.training.processes import LaunchSettings

# As in the guides of transformers, without optimizer, scheduler and the numbers that Trainer fills in.
DEEPSPEED = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "steps_per_print": 2000,
}


def write_accelerate(path, kind, **more):
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type=kind, mixed_precision="no", use_cpu=True,
        debug=False, **more,
    )  # fmt: skip
    config.to_yaml_file(path)


@pytest.fixture
def read(tmp_path):
    def read(content, **launch):
        path = tmp_path / "launch"
        if "distributed_type" in content:
            write_accelerate(path, content["distributed_type"], **content.get("more", {}))
        else:
            path.write_text(json.dumps(content))
        return resolve_launch(LaunchSettings(config_file="launch", **launch), tmp_path)

    return read


def accelerate(kind, **more):
    return {"distributed_type": kind, "more": more}


@pytest.mark.quick
def test_processes_and_strategy_are_read_from_a_file_of_accelerate(read, tmp_path):
    divided = read(accelerate("FSDP", num_processes=4, fsdp_config={"fsdp_offload_params": True}))
    assert (divided.num_processes, divided.strategy, divided.cpu_offload) == (4, "fsdp", True)
    assert read(accelerate("MULTI_CPU", num_processes=2)).strategy == "ddp"
    own = {"zero_stage": 1, "offload_optimizer_device": "cpu", "zero3_init_flag": False}
    zero = read(accelerate("DEEPSPEED", num_processes=3, deepspeed_config=own))
    assert (zero.num_processes, zero.strategy, zero.divides, zero.cpu_offload) == (3, "deepspeed", 1, True)
    (tmp_path / "zero.json").write_text(json.dumps(DEEPSPEED))
    own = {"deepspeed_config_file": "zero.json"}
    assert read(accelerate("DEEPSPEED", num_processes=3, deepspeed_config=own)).divides == 3
    for kind, more in (("MULTI_CPU", {"num_processes": -1}), ("XLA", {"num_processes": 2}),
                       ("MULTI_CPU", {"num_processes": 2, "num_machines": 2})):  # fmt: skip
        with raises_code("launch-config"):
            read(accelerate(kind, **more))
    with raises_code("unreadable-file"):
        resolve_launch(LaunchSettings(config_file="missing.yaml"), tmp_path)


@pytest.mark.quick
def test_zero_is_read_from_a_file_of_deepspeed(read):
    found = read(DEEPSPEED, num_processes=2)
    assert (found.num_processes, found.strategy, found.zero_stage, found.cpu_offload) == (
        2, "deepspeed", 3, True,
    )  # fmt: skip
    assert found.zero_options == {"overlap_comm": True, "sub_group_size": 1_000_000_000}


@pytest.mark.quick
@pytest.mark.parametrize(
    "more",
    [{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {"fp16": {"enabled": True}},
     {"gradient_clipping": 0.5}, {"tensor_parallel": {"autotp_size": 2}},
     {"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
     {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}],
)  # fmt: skip
def test_what_a_stage_sets_and_what_smelt_does_not_start_is_refused(read, more):
    with raises_code("launch-config"):
        read(DEEPSPEED | more)
