"""The key of an artifact: whatever would make it another one is part of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from smelt.compress.finetune import Finetune
from smelt.compress.prune.stage import Prune
from smelt.core.artifact import MASTER_WEIGHTS_FILE, FileRecord
from smelt.data.splits import Example, Split
from smelt.evaluate.environment import machine_id
from smelt.export.autotune import available_cores
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.config import GenerationSettings
from smelt.pipeline.execute import step_runner
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.execute.step_runner import StepRunner
from smelt.pipeline.inspect import machine
from smelt.pipeline.inspect.machine import has_bf16_instructions, training_device
from smelt.pipeline.plan.plan import PlanStep

ROWS = Split("made", (Example("a"), Example("b")))


def parent(key="parent", **files):
    return {"model": SimpleNamespace(key=key, manifest=SimpleNamespace(files=files))}


ANCESTORS = parent()


def shop(**changes):
    values = {
        "store": None, "task": "translation", "data": {"train": ROWS, "test": ROWS}, "seed": 0, "threads": 1,
        "validation_scorer": None, "display": None, "versions": {"torch": "2.13"}, "device": "cpu",
    }  # fmt: skip
    return StepRunner(**(values | changes))


def step(stage=Finetune, **settings):
    needs = stage.needs | stage.may_need
    return PlanStep(
        stage.name, stage.name, stage, stage.settings_type(**settings), "model", False, 1, needs=needs
    )


def key(of=None, step_draft=None, ancestors=ANCESTORS):
    return (of or shop()).step_key(step_draft or step(), ancestors)


def test_step_key_is_equal_for_equal_work():
    assert key() == key()
    assert key(shop(threads=2)) == key()
    assert key(shop(data={"train": ROWS, "test": Split("made", ROWS.examples[:1])})) == key()  # never seen


@pytest.mark.parametrize("other", [
    lambda: key(shop(seed=1)), lambda: key(shop(data={"train": Split("made", ROWS.examples[:1])})),
    lambda: key(shop(versions={"torch": "2.14"})), lambda: key(step_draft=step(learning_rate=0.5)),
    lambda: key(step_draft=step(Onnx)), lambda: key(ancestors=parent("another")),
])  # fmt: skip
def test_step_key_differs_for_different_work(other):
    assert other() != key()


def test_step_key_includes_master_weights_only_if_training_resumes_from_them():
    parents, others = (
        parent(**{MASTER_WEIGHTS_FILE: FileRecord(sha256=digit * 64, size_bytes=1)}) for digit in ("a", "b")
    )
    assert len({key(), key(ancestors=parents), key(ancestors=others)}) == 3
    lora_step, graph = step(lora={"r": 2}), step(Onnx)
    assert key(step_draft=lora_step, ancestors=parents) == key(step_draft=lora_step)  # codes stay as they are
    assert key(step_draft=graph, ancestors=parents) == key(step_draft=graph)
    weights = parent(**{"model.safetensors": FileRecord(sha256="a" * 64, size_bytes=1)})
    assert key(ancestors=weights) == key()


def test_step_key_depends_on_stage_version():
    class Later(Finetune):
        version = Finetune.version + 1

    assert key(step_draft=replace(step(), stage_class=Later)) != key()


def test_step_key_depends_on_training_device(monkeypatch):
    before = key(shop(device="auto"))
    graph = key(shop(device="auto"), step(Onnx))
    monkeypatch.setattr(machine, "cuda_missing_reason", lambda: None)
    assert key(shop(device="auto")) != before
    assert key(shop(device="auto")) == key(shop(device="cuda"))
    assert key(shop(device="cpu")) == before
    assert key(shop(device="auto"), step(Onnx)) == graph  # no training, so no matter


def test_step_key_depends_on_device_of_unit_scoring(monkeypatch):
    monkeypatch.setattr(machine, "cuda_missing_reason", lambda: None)
    scored = {need: replace(step(Prune), needs=frozenset({need})) for need in ("train", "calibration")}
    free = replace(step(Prune, importance="magnitude"), needs=frozenset())
    for prune_step in scored.values():
        assert key(shop(device="cuda"), prune_step) != key(shop(device="cpu"), prune_step)
    assert key(shop(device="cuda"), free) == key(shop(device="cpu"), free)


def test_step_key_depends_on_bf16_support_with_auto_precision(monkeypatch):
    automatic, fp32_key = key(), key(step_draft=step(precision="fp32"))
    monkeypatch.setattr(step_runner, "has_bf16_instructions", lambda: not has_bf16_instructions())
    assert key() != automatic
    assert key(step_draft=step(precision="fp32")) == fp32_key


def test_step_key_depends_on_settings_of_selection_metric():
    def scored(**changes):
        scorer_options = {"batch_size": 8} | changes
        generation = GenerationSettings(max_new_tokens=scorer_options.pop("new"))
        return shop(
            validation_scorer=Scorer(None, "translation", ("bleu",), generation, threads=1, **scorer_options)
        )

    chosen = step(metric_for_best_model="bleu")
    assert key(scored(new=5), chosen) == key(scored(new=5), chosen)
    assert key(scored(new=5), chosen) != key(scored(new=50), chosen)
    assert key(scored(new=5), chosen) != key(scored(new=5, truncation="error"), chosen)
    assert key(scored(new=5)) == key(scored(new=50)) == key()  # the loss generates nothing


def test_bf16_support_is_read_from_cpu_flags(tmp_path):
    for flags, expected in (("fpu avx2 avx512_bf16", True), ("fpu amx_tile", True), ("fpu avx512f", False)):
        (tmp_path / flags.replace(" ", "-")).write_text(f"flags : {flags}\n")
        assert has_bf16_instructions(tmp_path / flags.replace(" ", "-")) == expected
    assert not has_bf16_instructions(tmp_path / "nothing")


@pytest.mark.parametrize(("wanted", "lacks", "expected_device"), [
    ("auto", None, "cuda"), ("auto", "no driver", "cpu"), ("cpu", None, "cpu"), ("cuda", None, "cuda"),
])  # fmt: skip
def test_training_device_is_requested_one_if_available(wanted, lacks, expected_device, monkeypatch):
    monkeypatch.setattr(machine, "cuda_missing_reason", lambda: lacks)
    assert training_device(wanted) == expected_device


@pytest.mark.parametrize(("settings", "measures"), [
    ({}, False), ({"threads": 2}, False), ({"threads": "autotune"}, True),
    ({"autotune": {"batch_sizes": [8]}}, True),
])  # fmt: skip
def test_step_measured_on_machine_has_machine_key(settings, measures):
    step = SimpleNamespace(needs=frozenset(), settings=OnnxSettings(**settings))
    machine_key = StepRunner._machine_key(SimpleNamespace(device="cpu"), step)
    assert machine_key == ({"machine": machine_id(), "cores": available_cores()} if measures else {})
