"""Packed samples: the loss of one sequence is that of its samples in a padded batch."""

import json
import random

import pytest
import torch
from pydantic import ValidationError

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES_BY_TASK
from smelt.tasks.samples import IGNORE_INDEX, EncodedSample, collate, pack_samples
from smelt.training.extension import count_batch_items
from smelt.training.losses import label_objective
from tests.support import harness
from tests.support.expected_errors import setting_codes
from tests.support.models import causal, every_family

LENGTHS = (3, 9, 2, 6, 12, 5, 7)
PACKING_FAMILIES = sorted(set(FAMILIES_BY_TASK["text-generation"]) - {"opt"})


def windows():
    draw = random.Random(0)
    ids = [[draw.randrange(5, 30) for _ in range(n + 1)] for n in LENGTHS]
    return [EncodedSample(row, None, None, is_target=[False] + [True] * (len(row) - 1)) for row in ids]


@pytest.mark.quick
def test_packing_uses_few_sequences():
    samples = windows()
    packs = pack_samples(samples, None)
    assert [[len(w.input_ids) - 1 for w in pack.packed] for pack in packs] == [[12], [9, 3], [7, 5], [6, 2]]
    assert sorted(w.input_ids for pack in packs for w in pack.packed) == sorted(s.input_ids for s in samples)
    assert [pack.token_counts for pack in packs] == [(12, 0), (12, 0), (12, 0), (8, 0)]
    assert max(pack.token_counts[0] for pack in pack_samples(samples, 15)) == 15
    assert [len(pack.packed) for pack in pack_samples(samples, 1)] == [1] * len(LENGTHS)


@pytest.mark.parametrize("family", PACKING_FAMILIES)
def test_packed_loss_equals_padded_batch(family):
    """With attention between samples, or positions that go on, it differs by more than 0.001."""
    model = load_model(every_family.model_with_layers(family, 2))[0].eval()
    samples, loss = windows(), label_objective()
    padded = collate(samples, model.config)
    packed = collate(pack_samples(samples, 16), model.config)
    assert packed["input_ids"].numel() < padded["input_ids"].numel()
    assert count_batch_items(packed) == count_batch_items(padded) == dict.fromkeys(("labels", "inputs"), 44)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        expected = loss(model, padded).item()
        assert loss(model, packed).item() == pytest.approx(expected, abs=1e-5)
    for broken in (
        {"position_ids": torch.arange(16).expand_as(packed["position_ids"])},
        {"position_ids": packed["position_ids"], "attention_mask": packed["token_mask"]},
    ):
        assert abs(loss(model, packed | broken).item() - expected) > 1e-3


def test_packed_batches_contain_each_token_once():
    batch = collate(pack_samples(windows(), None), None)
    assert batch["position_ids"].tolist()[1] == [*range(9), *range(3)]
    assert batch["position_ids"].tolist()[3] == [*range(6), *range(2), *range(4)]
    assert batch["token_mask"].sum(1).tolist() == [12, 12, 12, 8]
    assert (batch["labels"][3, 8:] == IGNORE_INDEX).all()


def rows(count=12):
    texts = ["a cat", "the old house stands near the river", "two dogs sing a song", "she"]
    return Split("x", tuple(Example(texts[i % 4] + " x" * i, (texts[(i + 1) % 4],)) for i in range(count)))


@pytest.mark.parametrize("stage", ["finetune", "distill"])
def test_update_with_packing_equals_update_with_padding(tmp_path, stage):
    causal.write_model(tmp_path / "m", "llama", max_position_embeddings=128)
    (tmp_path / "m" / "text.json").write_text(json.dumps({"prompt_template": "Q: {prompt}"}))
    results = []
    for packing in (False, True):
        settings = {
            "max_steps": 1, "batch_size": 12, "learning_rate": 1e-2, "warmup_steps": 0, "precision": "fp32",
            "num_evals": 1, "packing": packing,
        }  # fmt: skip
        kind, stage_settings = (Finetune(), FinetuneSettings(**settings))
        if stage == "distill":
            losses = {"logits": 1.0, "labels": 0.5, "hidden_states": 0.1}
            kind, stage_settings = Distill(), DistillSettings(**settings, losses=losses, dropout=0.0)
        ctx = harness.run_stage(
            kind, stage_settings, tmp_path / "m", tmp_path / f"{packing}", "text-generation", rows()
        )
        results.append((ctx.details["training"], harness.logits(harness.load_output_model(ctx))))
    (padded, expected), (packed, logits) = results
    assert (padded["rows"], packed["rows"]) == (12, 12)
    assert packed["train_loss"] == pytest.approx(padded["train_loss"], abs=1e-5)
    assert packed["validation_loss"] == pytest.approx(padded["validation_loss"], abs=1e-4)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.quick
def test_unsupported_packing_is_rejected():
    settings = FinetuneSettings(packing=True)
    assert message_codes(Finetune.check_rows(settings, "language-modeling", {})) == ["does-not-fit-task"]
    assert message_codes(Distill.check_rows(DistillSettings(packing=True), "translation", {})) == [
        "does-not-fit-task"
    ]
    assert Finetune.check_rows(settings, "text-generation", {}) == []
    for family, codes in (("opt", ["does-not-fit-model"]), ("llama", [])):
        assert message_codes(Finetune.check_model(settings, {"model_type": family})[0]) == codes
    with pytest.raises(ValidationError) as caught:
        DistillSettings(packing=True, cache_logits={"top_k": 4})
    assert setting_codes(caught.value) == ["settings-conflict"]
