"""DeepSpeed divides a training. It is no dependency of the tests: pip install 'smelt[deepspeed]' runs all."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import other

from smelt.training.processes import LaunchSettings
from smelt.training.zero import ZeroModel, zero_config
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import tiny
from tests.support.processes import parallel_training

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the extra 'deepspeed' is not installed"
)
RESUMED = ("finetune/zero2/resumed", "finetune/zero3-offload/resumed", "lora/zero1/resumed")
# whole and divided parameters; weights that are whole between updates, integers, a second division
CASES = ("finetune/zero1", "selected masks/zero2", "qlora/zero3", "phases/zero3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("two")
    parallel_training.write_models(folder)
    stopped = [name.replace("resumed", "stopped") for name in RESUMED]
    parallel_training.run_processes(folder, work, *CASES, *stopped, *RESUMED)
    return folder, work


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *RESUMED])
def test_zero_computes_losses_of_one_process(trained, tmp_path, name):
    folder, work = trained
    single = parallel_training.train(folder, tmp_path, name.partition("/")[0]).details["training"]
    sharded = json.loads(parallel_training.details_file(work, name).read_text())["training"]
    assert sharded["curve"]["train_loss"] == pytest.approx(single["curve"]["train_loss"], abs=1e-5, rel=2e-5)
    for key in ("loss", "score"):
        values = [[v.get(key, 0.0) for v in training["validations"]] for training in (single, sharded)]
        assert values[1] == pytest.approx(values[0], abs=1e-5, rel=2e-5)
    assert (sharded["kept_step"], sharded["processes"]) == (single["kept_step"], 2)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3-offload"])
def test_zero_checkpoint_resumes_in_one_process(trained, tmp_path, strategy):
    folder, work = trained
    lines = []
    alone = parallel_training.train(folder, tmp_path / "alone", "finetune").details["training"]
    saved = work / f"stopped-{strategy}"
    ctx = parallel_training.train(folder, tmp_path, "finetune", unfinished=saved, log=lines.append)
    assert ["3" in line for line in lines if "resuming" in line] == [True]
    losses = ctx.details["training"]["curve"]["train_loss"]
    assert losses == pytest.approx(alone["curve"]["train_loss"], abs=1e-4)


@needs_deepspeed
def test_single_process_states_are_loaded_on_parameter_device(monkeypatch):
    """A parameter that was never used has none; fused AdamW needs its step next to the weights."""
    from deepspeed import utils

    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, unused], fused=True)
    used.sum().backward()
    optimizer.step()
    loaded, vector = [], torch.zeros(5, device="meta")
    monkeypatch.setattr(utils, "safe_set_full_optimizer_state", lambda p, _, name: loaded.append((p, name)))
    model = ZeroModel(torch.nn.Identity(), LaunchSettings(strategy="deepspeed"), torch.device("cpu"))
    model.set_optimizer(optimizer)
    inner = SimpleNamespace(state={}, param_groups=[{"params": [vector], "fused": True}])
    model._zero = SimpleNamespace(
        optimizer=inner, single_partition_of_fp32_groups=[vector], _lazy_init_hp_params_optimizer_state=list
    )
    saved = optimizer.state_dict()
    model.load_optimizer_state(saved["state"], saved["param_groups"])
    assert [(p is used, name) for p, name in loaded] == [(True, "exp_avg"), (True, "exp_avg_sq")]
    assert {tensor.device.type for tensor in inner.state[vector].values()} == {"meta"}


@pytest.mark.quick
def test_other_trainings_do_not_import_deepspeed(tmp_path, monkeypatch):
    tiny.write_marian(tmp_path / "model")
    monkeypatch.setattr(other, "is_deepspeed_available", lambda: pytest.fail("its import takes seconds"))
    parallel_training.train(tmp_path, tmp_path, "single samples")


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
