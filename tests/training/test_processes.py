"""Several processes compute the training of one."""

import parallel_training
import pytest
from parallel_training import CASES, FSDP_CASES, SHORT

from smelt.training.trainer import divide_batch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with the models, and the one with what two processes trained."""
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("two")
    parallel_training.write_models(folder)
    parallel_training.run_processes(folder, work, *CASES, *(f"{name}/fsdp" for name in FSDP_CASES))
    return folder, work


@pytest.mark.parametrize("name", [*CASES, *(f"{name}/fsdp" for name in FSDP_CASES)])
def test_two_processes_compute_the_losses_of_one(trained, tmp_path, name):
    folder, work = trained
    alone, together = (
        parallel_training.train(folder, tmp_path, name.partition("/")[0]).details,
        parallel_training.details(work, name),
    )
    one, two = alone["training"], together["training"]
    assert two["curve"]["step"] == one["curve"]["step"] == list(range(1, SHORT["max_steps"] + 1))
    assert two["curve"]["train_loss"] == pytest.approx(one["curve"]["train_loss"], abs=1e-5, rel=2e-5)
    assert [v["step"] for v in two["validations"]] == [v["step"] for v in one["validations"]] == [0, 2, 4]
    for key in ("loss", "score"):
        values = [[v.get(key, 0.0) for v in each["validations"]] for each in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-5, rel=2e-5)
    assert two["kept_step"] == one["kept_step"]
    others = [
        {k: v for k, v in each.items() if k not in {"training", "codes_changed"}}
        for each in (alone, together)
    ]
    assert others[0].keys() == others[1].keys()


@pytest.mark.quick
def test_samples_are_divided_evenly_and_an_empty_part_is_marked():
    assert divide_batch([4, 7, 1, 2, 9], 2) == [[4, 1, 9], [7, 2]]
    assert divide_batch([4], 3) == [[4], [-5], [-5]]
