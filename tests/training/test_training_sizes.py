"""Bytes of a training are those of torch's optimizers; its work grows with samples and weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.optimization import Adafactor

from smelt.models.model_size import SizeInputs, size_from_config, sum_of_weights
from smelt.training.settings import (
    TrainingSettings,
    lighter_trainings,
    trained_weights,
    training_size,
    weight_state_bytes,
)

SIZE = size_from_config(
    {
        "model_type": "bert", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000,
    }
)  # fmt: skip


def _inputs(**changes) -> SizeInputs:
    return SizeInputs(SIZE, SIZE, "text-classification", {"train": 320}, **changes)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adamw_torch_fused", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("adafactor", partial(Adafactor, relative_step=False)),
    ],
)
def test_weight_state_bytes_equal_optimizer(name, optimizer):
    weight = torch.nn.Parameter(torch.ones(100, 100))
    weight.grad = torch.ones_like(weight)
    optimizer_instance = optimizer([weight], lr=1e-3)
    optimizer_instance.step()
    states = [s for s in optimizer_instance.state[weight].values() if torch.is_tensor(s) and s.numel() > 1]
    num_bytes = weight.nbytes + weight.grad.nbytes + sum(s.nbytes for s in states)
    size = sum_of_weights(weight.numel())
    settings = TrainingSettings(optimizer=name, num_evals=0)
    assert weight_state_bytes(settings, size) == pytest.approx(num_bytes, rel=0.02)
    best = TrainingSettings(optimizer=name, num_evals=1, ema_decay=0.9)
    assert weight_state_bytes(best, size) - weight_state_bytes(settings, size) == 8 * weight.numel()


def test_adamw_needs_sixteen_bytes_per_weight():
    size = training_size(TrainingSettings(num_evals=0), _inputs())
    assert size.least_bytes == size.memory_bytes == 16 * SIZE.parameters


def test_lighter_settings_need_less_memory():
    settings = TrainingSettings(max_steps=10)
    size_as_given = training_size(settings, _inputs())
    lighter = {text: training_size(other, _inputs()) for text, other in lighter_trainings(settings)}
    assert all(size.memory_bytes < size_as_given.memory_bytes for size in lighter.values())
    assert lighter["optimizer: adafactor"].least_bytes == size_as_given.least_bytes - 8 * SIZE.parameters


def test_processes_replicate_weights_unless_sharded():
    single = training_size(TrainingSettings(), _inputs())
    replicated = training_size(TrainingSettings(), _inputs(processes=2))
    divided = training_size(TrainingSettings(), _inputs(processes=2, zero_stage=3))
    assert (replicated.least_bytes, divided.least_bytes) == (2 * single.least_bytes, single.least_bytes)
    assert replicated.memory_bytes - divided.memory_bytes == weight_state_bytes(TrainingSettings(), SIZE)


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"epochs": 3}, 3 * 320),
        ({"max_steps": 10, "batch_size": 8, "gradient_accumulation_steps": 2}, 10 * 8 * 2),
        ({"max_steps": 10, "max_tokens_per_batch": 500}, 10 * 500),
    ],
)
def test_work_is_three_passes_for_each_sample_and_one_of_the_teacher(settings, samples):
    teacher = sum_of_weights(1000)
    size = training_size(TrainingSettings(**settings), _inputs(), teachers=[teacher])
    assert size.work == samples * (3 * SIZE.parameters + 1000)


def test_work_on_a_split_that_was_not_read_is_unknown():
    assert training_size(TrainingSettings(epochs=1), SizeInputs(SIZE, SIZE, "translation", {})).work is None


def test_lower_bounds_exclude_remote_and_offloaded_memory():
    """On other machines, on the CPU, or in layers without adapters."""
    single, remote = training_size(TrainingSettings(), _inputs()), {"processes": 2, "machines": 2}
    remote_cost = training_size(TrainingSettings(), _inputs(**remote))
    divided = training_size(TrainingSettings(), _inputs(**remote, zero_stage=3))
    assert (remote_cost.least_bytes, divided.least_bytes) == (single.least_bytes, single.least_bytes // 2)
    on_gpu = partial(_inputs, is_gpu=True)
    paged = training_size(TrainingSettings(optimizer="paged_adamw_32bit"), on_gpu())
    assert paged.least_device_bytes == 8 * SIZE.parameters
    offloaded = training_size(TrainingSettings(), on_gpu(processes=2, zero_stage=3, offloaded=True))
    assert offloaded.least_device_bytes == 0 < offloaded.device_bytes
    [stack] = SIZE.stacks
    sides = sum(n + m for n, m in stack.matrices[stack.feed_forward :])  # query, key, value, output
    lora = TrainingSettings(lora={"r": 4, "targets": ["attention"]})
    assert trained_weights(lora, SIZE) == 4 * stack.layers * sides == 4 * 2 * 4 * 128


def test_deepspeed_cpu_offload_keeps_copy_and_moves_model_to_each_gpu():
    """The engine of 0.19 calls module.to(device); stages 1 and 2 clone their part in float32."""
    two, weights = {"processes": 2, "zero_stage": 2}, 4 * SIZE.parameters
    fsdp, zero = (
        training_size(TrainingSettings(), _inputs(**two, by_deepspeed=by)).memory_bytes
        for by in (False, True)
    )
    assert zero - fsdp == weights  # half of one in each of both
    on_gpu = _inputs(is_gpu=True, processes=8, zero_stage=3, offloaded=True, by_deepspeed=True)
    assert training_size(TrainingSettings(), on_gpu).least_device_bytes == weights
