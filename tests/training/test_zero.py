"""DeepSpeed divides a training. It is no dependency of the tests: pip install 'smelt[deepspeed]' runs all."""

import json
from importlib.util import find_spec

import pytest
import torch

from smelt.training.processes import LaunchSettings
from smelt.training.sharding import zero_config
from tests.support.expected_errors import raises_setting_codes
from tests.support.processes import parallel_training

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the extra 'deepspeed' is not installed"
)
# whole and divided parameters; averages, weights that are whole between updates, integers, twice divided
CASES = (
    "finetune/zero1", "masks/zero2", "selected/zero2", "finetune/zero3-offload", "qlora/zero3",
    "phases/zero3",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("two")
    parallel_training.write_models(folder)
    parallel_training.run_processes(folder, work, *CASES)
    return folder, work


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_zero_computes_losses_of_one_process(trained, tmp_path, name):
    folder, work = trained
    single = parallel_training.train(folder, tmp_path, name.partition("/")[0]).details["training"]
    sharded = json.loads(parallel_training.details_file(work, name).read_text())["training"]
    assert sharded["curve"]["train_loss"] == pytest.approx(single["curve"]["train_loss"], abs=1e-5, rel=2e-5)
    for key in ("loss", "score"):
        values = [[v.get(key, 0.0) for v in training["validations"]] for training in (single, sharded)]
        assert values[1] == pytest.approx(values[0], abs=1e-5, rel=2e-5)
    assert (sharded["kept_step"], sharded["processes"]) == (single["kept_step"], 2)


@pytest.mark.quick
def test_zero_config_reflects_recipe():
    model = torch.nn.Linear(2, 3)
    launch = LaunchSettings(num_processes=2, strategy="deepspeed", zero_options={"overlap_comm": True})
    config = zero_config(launch, model)
    zero = {"stage": 2, "reduce_bucket_size": 9, "allgather_bucket_size": 10, "overlap_comm": True}
    assert config["zero_optimization"] == zero
    assert config["zero_force_ds_cpu_optimizer"] is False  # its own optimizer would be compiled
    assert config["gradient_accumulation_steps"] == config["gradient_clipping"] == "auto"
    offloaded = launch.model_copy(update={"zero_stage": 3, "cpu_offload": True})
    zero_optimization = zero_config(offloaded, model)["zero_optimization"]
    assert zero_optimization["offload_param"] == zero_optimization["offload_optimizer"] == {"device": "cpu"}
    assert (
        zero_optimization["stage3_param_persistence_threshold"]
        == zero_optimization["stage3_max_reuse_distance"]
        == 0
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "code"),
    [({"zero_stage": 3}, "settings-conflict"),
     ({"strategy": "fsdp", "zero_options": {"overlap_comm": True}}, "settings-conflict"),
     ({"strategy": "deepspeed", "zero_options": {"overlap": True}}, "unknown-setting")],
)  # fmt: skip
def test_zero_settings_are_checked(settings, code):
    with raises_setting_codes(code):
        LaunchSettings(num_processes=2, **settings)
