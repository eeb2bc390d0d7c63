"""Processes and strategy from a file of accelerate or of DeepSpeed."""

import json
from types import SimpleNamespace

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from smelt.core.messages import message_codes
from smelt.pipeline.plan.warnings import launch_warnings
from smelt.pipeline.recipe.launch_file import resolve_launch
from smelt.training.processes import LaunchSettings
from tests.support.expected_errors import raises_code, raises_setting_codes

# As in the guides of transformers, without optimizer, scheduler and the numbers that Trainer fills in.
DEEPSPEED = {
    "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"}, "overlap_comm": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "steps_per_print": 2000,
}  # fmt: skip


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
def test_processes_and_strategy_are_read_from_accelerate_file(read, tmp_path):
    divided = read(accelerate("FSDP", num_processes=4, fsdp_config={"fsdp_offload_params": True}))
    assert (divided.num_processes, divided.strategy, divided.cpu_offload) == (4, "fsdp", True)
    assert read(accelerate("MULTI_CPU", num_processes=2)).strategy == "ddp"
    deepspeed_config = {"zero_stage": 1, "offload_optimizer_device": "cpu", "zero3_init_flag": False}
    zero = read(accelerate("DEEPSPEED", num_processes=3, deepspeed_config=deepspeed_config))
    assert (zero.num_processes, zero.strategy, zero.divides, zero.cpu_offload) == (3, "deepspeed", 1, True)
    (tmp_path / "zero.json").write_text(json.dumps(DEEPSPEED))
    deepspeed_config = {"deepspeed_config_file": "zero.json"}
    assert read(accelerate("DEEPSPEED", num_processes=3, deepspeed_config=deepspeed_config)).divides == 3
    for kind, options in (("MULTI_CPU", {"num_processes": -1}), ("XLA", {"num_processes": 2}),
                       ("MULTI_CPU", {"num_processes": 2, "num_machines": 2})):  # fmt: skip
        with raises_code("launch-config"):
            read(accelerate(kind, **options))
    with raises_code("unreadable-file"):
        resolve_launch(LaunchSettings(config_file="missing.yaml"), tmp_path)


@pytest.mark.quick
def test_zero_settings_are_read_from_deepspeed_file(read):
    settings = read(DEEPSPEED, num_processes=2)
    assert (settings.num_processes, settings.strategy, settings.zero_stage, settings.cpu_offload) == (
        2, "deepspeed", 3, True,
    )  # fmt: skip
    assert settings.zero_options == {"overlap_comm": True, "sub_group_size": 1_000_000_000}
    overridden = read(DEEPSPEED, num_processes=2, strategy="deepspeed", zero_options={"overlap_comm": False})
    assert overridden.zero_options == settings.zero_options | {"overlap_comm": False}
    off = {"flops_profiler": {"enabled": False}, "prescale_gradients": False}
    assert read(DEEPSPEED | off, num_processes=2, zero_stage=2, cpu_offload=False) == settings.model_copy(
        update={"zero_stage": 2, "cpu_offload": False}
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "more",
    [{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {"fp16": {"enabled": True}},
     {"gradient_clipping": 0.5}, {"tensor_parallel": {"autotp_size": 2}},
     {"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
     {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
     {"zero_optimization": {"stage": True}},
     {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
     {"zero_optimization": {"stage": 2, "allgather_bucket_size": 7}},
     {"zero_optimization": {"stage": 2, "offload_param": "cpu"}},
     {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "ratio": 0.3}}},
     {"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}},
     {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0.5}},
     {"zero_optimization": {"stage": 2, "reduce_bucket_size": True}},
     {"zero_optimization": {"stage": 2, "overlap_comm": 1}}],
)  # fmt: skip
def test_unsupported_deepspeed_settings_are_rejected(read, more):
    with raises_code("launch-config"):
        read(DEEPSPEED | more)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "more"),
    [("DEEPSPEED", {"deepspeed_config": {"gradient_clipping": 1.0}}),
     ("DEEPSPEED", {"deepspeed_config": {"gradient_accumulation_steps": 4}}),
     ("FSDP", {"fsdp_config": {"fsdp_reshard_after_forward": "NO_SHARD"}}),
     ("MULTI_GPU", {"gpu_ids": "2,3"}), ("MULTI_GPU", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}})],
)  # fmt: skip
def test_stage_settings_in_accelerate_file_are_rejected(read, kind, more):
    with raises_code("launch-config"):
        read(accelerate(kind, num_processes=2, **more))


@pytest.mark.quick
@pytest.mark.parametrize("line", [
    "blub: 3", "fsdp_config: {fsdp_activation_checkpointing: true}",
    "dynamo_config: {dynamo_backend: INDUCTOR}", "num_machines: 2",
])  # fmt: skip
def test_unused_settings_in_accelerate_file_are_rejected(line, tmp_path):
    path, launch = tmp_path / "launch.yaml", LaunchSettings(config_file="launch.yaml")
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nnum_machines: '1'\n")
    assert resolve_launch(launch, tmp_path).strategy == "fsdp"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 2\n{line}\n")
    with raises_code("launch-config"):
        resolve_launch(launch, tmp_path)


@pytest.mark.quick
def test_recipe_settings_override_launch_file(read):
    assert read(accelerate("FSDP", num_processes=2), num_processes=4).num_processes == 4
    with raises_code("launch-config"):
        read(accelerate("MULTI_CPU", num_processes=2), cpu_offload=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    "text", ["", "no json", "[1, 2]", '{"zero_optimization": {"stage": 2, "stage": 3}}', '{"stage": ',
             "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2",
             "distributed_type: FSDP\nnum_processes: true", '{"zero_optimization": {"stage": 2},}']
)  # fmt: skip
def test_other_launch_files_are_rejected(tmp_path, text):
    (tmp_path / "launch.json").write_text(text)
    with raises_code("launch-config"):
        resolve_launch(LaunchSettings(config_file="launch.json"), tmp_path)
    (tmp_path / "launch.json").write_text('{\n\t"zero_optimization": {"stage": 1}}')
    assert resolve_launch(LaunchSettings(config_file="launch.json"), tmp_path).divides == 1


@pytest.mark.quick
def test_buffer_sizes_must_be_positive_integers():
    for options in ({"reduce_bucket_size": 0}, {"sub_group_size": True}, {"overlap_comm": 2}):
        with raises_setting_codes("wrong-value"):
            LaunchSettings(num_processes=2, strategy="deepspeed", zero_options=options)
    with raises_setting_codes("wrong-value"):
        LaunchSettings(num_processes=2, strategy="deepspeed", zero_options={"reduce_bucket_size": -1})


@pytest.mark.quick
def test_strategy_with_one_process_warns():
    codes = [
        message_codes(launch_warnings(SimpleNamespace(launch=LaunchSettings(strategy=strategy, **options))))
        for strategy, options in (
            ("fsdp", {}),
            ("deepspeed", {}),
            ("ddp", {}),
            ("fsdp", {"num_processes": 2}),
        )
    ]
    assert codes == [["one-process"], ["one-process"], [], []]
