"""Several processes compute the training of one."""

import functools
import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from smelt.compress.finetune import FinetuneSettings
from smelt.training.processes import LaunchSettings
from smelt.training.sharding import FsdpWeights, fsdp_config
from smelt.training.trainer import divide_batch, require_trainable
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.pairs.matrix import is_full_matrix
from tests.support.processes import parallel_training
from tests.support.processes.parallel_training import CASES, DIVIDED, MASKS, SHORT

# The others train in the same ways, and take a minute: with SMELT_MATRIX=all.
_FEW = ("finetune", "masks", "teacher texts", "finetune/fsdp", "qlora/fsdp")
NAMES = [name for name in (*CASES, *(f"{name}/fsdp" for name in DIVIDED)) if is_full_matrix() or name in _FEW]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with the models, and the one with what two processes trained."""
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("two")
    parallel_training.write_models(folder)
    resumed = ("finetune/fsdp/stopped", "finetune/fsdp/resumed")
    parallel_training.run_processes(folder, work, *NAMES, *resumed)
    return folder, work


@pytest.fixture(scope="module")
def train_alone(trained, tmp_path_factory):
    """Return what one process trains of a case, once."""

    @functools.cache
    def train(name):
        return parallel_training.train(trained[0], tmp_path_factory.mktemp("alone"), name)

    return train


@pytest.mark.parametrize("name", [*NAMES, "finetune/fsdp/resumed"])
def test_two_processes_compute_losses_of_one(trained, train_alone, name):
    _, work = trained
    alone = train_alone(name.partition("/")[0]).details
    together = json.loads(parallel_training.details_file(work, name).read_text())
    single, double = alone["training"], together["training"]
    assert double["curve"]["step"] == single["curve"]["step"] == list(range(1, SHORT["max_steps"] + 1))
    assert double["curve"]["train_loss"] == pytest.approx(single["curve"]["train_loss"], abs=1e-5, rel=2e-5)
    assert (
        [v["step"] for v in double["validations"]] == [v["step"] for v in single["validations"]] == [0, 2, 4]
    )
    for key in ("loss", "score"):
        values = [[v.get(key, 0.0) for v in training["validations"]] for training in (single, double)]
        assert values[1] == pytest.approx(values[0], abs=1e-5, rel=2e-5)
    assert double["kept_step"] == single["kept_step"]
    assert alone.keys() == together.keys()


def test_fsdp_checkpoint_resumes_in_one_process(trained, train_alone, tmp_path):
    folder, work = trained
    lines = []
    alone = train_alone("finetune").details["training"]
    unfinished = work / "stopped-fsdp"
    ctx = parallel_training.train(folder, tmp_path, "finetune", unfinished=unfinished, log=lines.append)
    assert ["3" in line for line in lines if "resuming" in line] == [True]
    assert ctx.details["training"]["curve"]["train_loss"] == pytest.approx(
        alone["curve"]["train_loss"], abs=1e-4
    )


ZERO_2, ZERO_3 = ({"strategy": "deepspeed", "zero_stage": stage} for stage in (2, 3))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("launch", "more", "shape"),
    [({"strategy": "fsdp"}, {"precision": "fp16"}, (1,)), ({"strategy": "fsdp"}, {}, ()), (ZERO_3, {}, ()),
     (ZERO_2, {"precision": "fp16"}, (1,)), (ZERO_2, {"optimizer": "adafactor"}, (1,)),
     (ZERO_2, {"checkpoint_interval_minutes": 1}, (1,)),
     ({"strategy": "fsdp"}, MASKS, (1,)), (ZERO_3, {"qat": {"scales": "lsq"}}, (1,))],
)  # fmt: skip
def test_unsupported_strategy_settings_are_rejected(launch, more, shape):
    model = torch.nn.ParameterDict({"scale": torch.nn.Parameter(torch.ones(shape))})
    with raises_code("not-with-strategy"):
        require_trainable(model, FinetuneSettings(**more), LaunchSettings(num_processes=2, **launch))
    for other in (None, LaunchSettings(num_processes=2)):
        require_trainable(model, FinetuneSettings(**more), other)
    without_checkpoints = FinetuneSettings(checkpoint_interval_minutes=None)
    for settings in (FinetuneSettings(), without_checkpoints):
        require_trainable(torch.nn.Linear(1, 1), settings, LaunchSettings(num_processes=2, **ZERO_2))


@pytest.fixture
def alone_in_a_group():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield LaunchSettings(num_processes=2, strategy="fsdp")
    torch.distributed.destroy_process_group()


@pytest.mark.quick
def test_divided_model_is_full_between_updates_and_afterwards(alone_in_a_group):
    """Afterwards it is an ordinary model, which can be divided again; handles still remove their hooks."""
    model = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2)))
    outer = torch.nn.Sequential(model)
    handle = model[0][0].register_forward_hook(lambda *_: None)
    before = [(type(m), set(vars(m)), len(m._forward_pre_hooks)) for m in outer.modules()]
    values = [p.detach().clone() for p in outer.parameters()]
    for _ in range(2):
        weights = FsdpWeights(torch.nn.Sequential(outer))
        for module in (*model[0], weights.module):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert all(isinstance(p, DTensor) for p in outer.parameters())
        with torch.no_grad():
            for p in outer.parameters():
                p.add_(1.0)
        values = [value + 1 for value in values]
        divided = list(outer.parameters())
        with weights.whole():
            torch.testing.assert_close([p.detach() for p in outer.parameters()], values)
            outer[0][0][0].weight.data.zero_()
        assert all(p is q for p, q in zip(outer.parameters(), divided, strict=True))
        weights.restore()
        assert [(type(m), set(vars(m)), len(m._forward_pre_hooks)) for m in outer.modules()] == before
        torch.testing.assert_close([p.detach() for p in outer.parameters()], values)
    handle.remove()
    assert not model[0][0]._forward_hooks


@pytest.mark.quick
def test_layers_that_share_parameters_are_not_divided_by_themselves():
    model = torch.nn.Sequential(
        torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2)),
        torch.nn.ModuleList(torch.nn.Bilinear(2, 2, 2) for _ in range(2)),
    )
    launch = LaunchSettings(num_processes=2, strategy="fsdp")
    assert fsdp_config(model, launch)["transformer_layer_cls_to_wrap"] == ["Bilinear", "Linear"]
    model.append(torch.nn.Linear(2, 2))
    model[2].weight = model[0][0].weight
    assert fsdp_config(model, launch)["transformer_layer_cls_to_wrap"] == ["Bilinear"]
    assert fsdp_config(model[2], launch)["auto_wrap_policy"] == "NO_WRAP"


@pytest.mark.quick
def test_batches_are_divided_evenly_with_marked_empty_parts():
    assert divide_batch([4, 7, 1, 2, 9], 2) == [[4, 1, 9], [7, 2]]
    assert divide_batch([4], 3) == [[4], [-5], [-5]]


@pytest.mark.quick
def test_cpu_offload_requires_sharding():
    with raises_setting_codes("settings-conflict"):
        LaunchSettings(num_processes=2, cpu_offload=True)
