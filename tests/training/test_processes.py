"""Several processes compute the training of one."""

import json

import parallel_training
import pytest
import torch
from expected_errors import raises_code, raises_setting_codes
from parallel_training import CASES, FSDP_CASES, SHORT

from smelt.compress.finetune import FinetuneSettings
from smelt.training.extension import TrainingExtension
from smelt.training.processes import LaunchSettings
from smelt.training.sharding import require_shardable
from smelt.training.trainer import divide_batch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with the models, and the one with what two processes trained."""
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("two")
    parallel_training.write_models(folder)
    parallel_training.run_processes(folder, work, *CASES, *(f"{name}/fsdp" for name in FSDP_CASES),
                                    "finetune/fsdp/stopped", "finetune/fsdp/resumed")  # fmt: skip
    return folder, work


@pytest.mark.parametrize("name", [*CASES, *(f"{name}/fsdp" for name in FSDP_CASES), "finetune/fsdp/resumed"])
def test_two_processes_compute_the_losses_of_one(trained, tmp_path, name):
    folder, work = trained
    alone = parallel_training.train(folder, tmp_path, name.partition("/")[0]).details
    together = json.loads(parallel_training.details_file(work, name).read_text())
    one, two = alone["training"], together["training"]
    assert two["curve"]["step"] == one["curve"]["step"] == list(range(1, SHORT["max_steps"] + 1))
    assert two["curve"]["train_loss"] == pytest.approx(one["curve"]["train_loss"], abs=1e-5, rel=2e-5)
    assert [v["step"] for v in two["validations"]] == [v["step"] for v in one["validations"]] == [0, 2, 4]
    for key in ("loss", "score"):
        values = [[v.get(key, 0.0) for v in each["validations"]] for each in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-5, rel=2e-5)
    assert two["kept_step"] == one["kept_step"]
    assert alone.keys() == together.keys()


def test_a_divided_training_resumes_in_one_process(trained, tmp_path):
    folder, work = trained
    lines = []
    alone = parallel_training.train(folder, tmp_path / "alone", "finetune").details["training"]
    unfinished = work / "stopped"
    ctx = parallel_training.train(folder, tmp_path, "finetune", unfinished=unfinished, log=lines.append)
    assert ["3" in line for line in lines if "resuming" in line] == [True]
    assert ctx.details["training"]["curve"]["train_loss"] == pytest.approx(
        alone["curve"]["train_loss"], abs=1e-4
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("more", "modules"), [({"lora": {"rank": 2}}, {}), ({"metric_for_best_model": "bleu"}, {}),
                          ({"precision": "fp16"}, {}), ({}, {"scores": torch.nn.Linear(1, 1)})],
)  # fmt: skip
def test_trainings_that_change_single_weights_are_not_divided(more, modules):
    settings, model = FinetuneSettings(**more), torch.nn.Linear(2, 2)
    with raises_code("not-with-fsdp"):
        require_shardable(model, settings, TrainingExtension(modules=modules))
    require_shardable(model, FinetuneSettings(), TrainingExtension())


@pytest.mark.quick
def test_samples_are_divided_evenly_and_an_empty_part_is_marked():
    assert divide_batch([4, 7, 1, 2, 9], 2) == [[4, 1, 9], [7, 2]]
    assert divide_batch([4], 3) == [[4], [-5], [-5]]


@pytest.mark.quick
def test_only_divided_parameters_are_kept_on_the_cpu():
    with raises_setting_codes("settings-conflict"):
        LaunchSettings(num_processes=2, cpu_offload=True)
