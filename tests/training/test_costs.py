"""Bytes of a training are those of torch's optimizers; lighter settings are lighter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.optimization import Adafactor

from smelt.models.costs import CostInputs, SampleLengths
from smelt.models.model_size import ModelSize, size_from_config
from smelt.training.settings import (
    TrainingSettings,
    lighter_trainings,
    trained_weights,
    training_cost,
    weight_state_bytes,
)

SIZE = size_from_config(
    {
        "model_type": "bert", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000,
    }
)  # fmt: skip


def _inputs(**changes) -> CostInputs:
    samples = {"train": SampleLengths(tuple(range(8, 40)), (0,) * 32, 320)}
    return CostInputs(SIZE, SIZE, "text-classification", samples, **changes)


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
    size = ModelSize("bert", 100, 0, (), 0, 0, other_weights=weight.numel())
    settings = TrainingSettings(optimizer=name, num_evals=0)
    assert weight_state_bytes(settings, size) == pytest.approx(num_bytes, rel=0.02)
    best = TrainingSettings(optimizer=name, num_evals=1, ema_decay=0.9)
    assert weight_state_bytes(best, size) - weight_state_bytes(settings, size) == 8 * weight.numel()


def test_adamw_needs_sixteen_bytes_per_weight():
    cost = training_cost(TrainingSettings(num_evals=0), _inputs())
    assert cost.least_bytes == 16 * SIZE.parameters
    assert cost.memory_bytes > cost.least_bytes


def test_lighter_settings_need_less_memory_with_similar_work():
    settings = TrainingSettings(max_steps=10)
    default_cost = training_cost(settings, _inputs())
    lighter = {text: training_cost(other, _inputs()) for text, other in lighter_trainings(settings)}
    assert all(cost.memory_bytes < default_cost.memory_bytes for cost in lighter.values())
    half = lighter["batch_size: 16, gradient_accumulation_steps: 2"]
    flops = [cost.work.amounts["training", 64] for cost in (default_cost, half)]
    assert 0.7 * flops[0] < flops[1] <= flops[0]  # smaller batches are padded less
    assert lighter["optimizer: adafactor"].least_bytes == default_cost.least_bytes - 8 * SIZE.parameters


def test_processes_replicate_weights_unless_sharded():
    single = training_cost(TrainingSettings(), _inputs())
    replicated = training_cost(TrainingSettings(), _inputs(processes=2, cores=2, concurrent=2))
    divided = training_cost(TrainingSettings(), _inputs(processes=2, zero_stage=3))
    assert (replicated.least_bytes, divided.least_bytes) == (2 * single.least_bytes, single.least_bytes)
    assert replicated.memory_bytes - divided.memory_bytes == weight_state_bytes(TrainingSettings(), SIZE)
    assert replicated.work.amounts["training", 64] == single.work.amounts["training", 64] / 2


def test_more_processes_than_cores_are_slower():
    """They share the cores, each starts and makes all calls; only what computes at a time saves time."""
    settings = TrainingSettings(max_steps=100)
    single, two, sixteen = (
        training_cost(settings, _inputs(processes=n, cores=2, concurrent=min(n, 2))).work.amounts
        for n in (1, 2, 16)
    )
    assert sixteen["training", 64] == two["training", 64] == single["training", 64] / 2
    assert single["calls", 0] < two["calls", 0] < sixteen["calls", 0]
    assert single["moved", 0] < sixteen["moved", 0]  # each updates all weights


def test_lower_bounds_exclude_remote_and_offloaded_memory():
    """On other machines, on the CPU, or in layers without adapters."""
    single, remote = training_cost(TrainingSettings(), _inputs()), {"processes": 2, "machines": 2}
    remote_cost = training_cost(TrainingSettings(), _inputs(**remote))
    divided = training_cost(TrainingSettings(), _inputs(**remote, zero_stage=3))
    assert (remote_cost.least_bytes, divided.least_bytes) == (single.least_bytes, single.least_bytes // 2)
    on_gpu = partial(_inputs, is_gpu=True)
    paged = training_cost(TrainingSettings(optimizer="paged_adamw_32bit"), on_gpu())
    assert paged.least_device_bytes == 8 * SIZE.parameters
    offloaded = training_cost(TrainingSettings(), on_gpu(processes=2, zero_stage=3, offloaded=True))
    assert offloaded.least_device_bytes == 0 < offloaded.device_bytes
    [stack] = SIZE.stacks
    sides = sum(n + m for n, m in stack.matrices[stack.feed_forward :])  # query, key, value, output
    lora = TrainingSettings(lora={"rank": 4, "targets": ["attention"]})
    assert trained_weights(lora, SIZE) == 4 * stack.layers * sides == 4 * 2 * 4 * 128


def test_deepspeed_cpu_offload_keeps_copy_and_moves_model_to_each_gpu():
    """The engine of 0.19 calls module.to(device); stages 1 and 2 clone their part in float32."""
    two, weights = {"processes": 2, "zero_stage": 2}, 4 * SIZE.parameters
    fsdp, zero = (
        training_cost(TrainingSettings(), _inputs(**two, by_deepspeed=by)).memory_bytes
        for by in (False, True)
    )
    assert zero - fsdp == weights  # half of one in each of both
    on_gpu = _inputs(is_gpu=True, processes=8, zero_stage=3, offloaded=True, by_deepspeed=True)
    assert training_cost(TrainingSettings(), on_gpu).least_device_bytes == weights
