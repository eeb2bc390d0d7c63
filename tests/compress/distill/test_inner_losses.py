"""Losses inside both models: the formulas on transformers' own states, every family, what cannot be had."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.objective import DistillObjective, make_inner_losses
from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES, model_attentions
from smelt.tasks.samples import EncodedSample, collate
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, images, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES

ALL = {"hidden_states": 1.0, "input_embeddings": 0.5, "attention": 0.7, "self_attention_relations": 0.3}
TEXTS = [
    EncodedSample([2, 5, 6, 7, 8, 3], None, 1),
    EncodedSample([2, 9, 3], None, 0),
    EncodedSample([2, 8, 8, 3], None, 1),
]


def bert(folder, seed, **config):
    return load_model(tiny.write_bert(folder, seed, **config))[0]


def settings(losses, **more):
    return DistillSettings.model_validate({"losses": {"logits": 0, "labels": 0, **losses}} | more)


def terms(student, teacher, chosen, rows):
    inner = make_inner_losses(student, teacher, chosen, seed=3)
    with torch.no_grad(), inner.capture():
        loss_terms = DistillObjective(teacher, chosen, inner)(student, collate(rows, student.config))
    return {name: float(term.value) for name, term in loss_terms.items()}, inner


def read(model, rows):
    """Hidden states as transformers gives them, and queries, keys, values of each layer from them."""
    batch = collate(rows, model.config)
    feeds = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        states = model(**feeds, output_hidden_states=True).hidden_states
        layers = [layer.attention.self for layer in model.bert.encoder.layer]
        parts = [
            {projection: getattr(layer, projection)(states[n]) for projection in ("query", "key", "value")}
            for n, layer in enumerate(layers)
        ]
    return states, parts, batch["attention_mask"].bool()


def scores(parts, heads):
    """Scaled scores [B, H, L, L] of one layer."""
    q, k = (parts[w].unflatten(-1, (heads, -1)).transpose(1, 2) for w in ("query", "key"))
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def test_narrow_student_losses_equal_tinybert_with_one_projection(tmp_path):
    teacher = bert(tmp_path / "t", 0, num_hidden_layers=4)
    student = bert(tmp_path / "s", 1, hidden_size=16, num_hidden_layers=2)
    chosen = settings({name: weight for name, weight in ALL.items() if name != "self_attention_relations"})
    losses, inner = terms(student, teacher, chosen, TEXTS)
    student_states, student_projections, mask = read(student, TEXTS)
    teacher_states, teacher_projections, _ = read(teacher, TEXTS)
    weight = inner.modules["projection"].weight.detach()
    assert weight.shape == (32, 16)

    def apart(a, b):
        return float(F.mse_loss((student_states[a] @ weight.T)[mask], teacher_states[b][mask]))

    assert losses["hidden_states"] == pytest.approx(apart(1, 2) + apart(2, 4), rel=1e-4)
    assert losses["input_embeddings"] == pytest.approx(0.5 * apart(0, 0), rel=1e-4)
    expected = 0.0
    for a, b in ((1, 2), (2, 4)):
        squares = (scores(student_projections[a - 1], 4) - scores(teacher_projections[b - 1], 4)) ** 2
        rows = [squares[n, :, q, :length].mean() for n, length in enumerate((6, 3, 4)) for q in range(length)]
        expected += 0.7 * float(torch.stack(rows).mean())
    assert losses["attention"] == pytest.approx(expected, rel=1e-4)


def test_layer_reduction_mean_divides_by_number_of_mapped_layers(tmp_path):
    teacher, student = bert(tmp_path / "t", 0, num_hidden_layers=4), bert(tmp_path / "s", 1)
    weights = {"hidden_states": 1.0, "attention": 0.7, "input_embeddings": 0.5, "cosine": 1.0}
    added, _ = terms(student, teacher, settings(weights), TEXTS)
    means, _ = terms(student, teacher, settings(weights, layer_reduction="mean"), TEXTS)
    layers = {
        "hidden_states": student.config.num_hidden_layers,
        "attention": student.config.num_hidden_layers,
    }
    assert means == pytest.approx({name: value / layers.get(name, 1) for name, value in added.items()})


@pytest.mark.parametrize(
    "kind", ["hidden_states", "input_embeddings", "attention", "self_attention_relations"]
)
def test_image_losses_compare_all_patches(kind, tmp_path):
    teacher = load_model(images.write_model(tmp_path / "t", hidden_size=32))[0]
    student = load_model(images.write_model(tmp_path / "s", hidden_size=16))[0]
    chosen = settings({kind: 1.0})
    inner = make_inner_losses(student, teacher, chosen, seed=3)
    size = student.config.image_size
    batch = {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.tensor([0, 1, 0])}
    with torch.no_grad(), inner.capture():
        loss_terms = DistillObjective(teacher, chosen, inner)(student, batch)
    with torch.no_grad():
        outputs = [m.vit(batch["pixel_values"], output_hidden_states=True) for m in (student, teacher)]
    student_states, teacher_states = (
        [*output.hidden_states[:-1], output.last_hidden_state] for output in outputs
    )
    value = float(loss_terms[kind].value)
    assert value > 0
    if kind in ("hidden_states", "input_embeddings"):
        weight = inner.modules["projection"].weight.detach()
        assert weight.shape == (32, 16)
        state_indices = range(1, len(student_states)) if kind == "hidden_states" else [0]
        expected = sum(
            F.mse_loss(student_states[index] @ weight.T, teacher_states[index]) for index in state_indices
        )
        assert value == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_identical_student_has_zero_loss_in_every_family(family):
    folder = every_family.model_with_layers(family, 2)
    teacher, student = load_model(folder)[0], load_model(folder)[0]
    reads_scores = all(a.uses_attention_interface for a in model_attentions(teacher))
    chosen = settings(ALL if reads_scores else ALL | {"attention": 0})
    target = [5, 6, 7] if student.config.is_encoder_decoder else None
    if FAMILIES[family].architecture == "encoder":
        target = 1
    rows = [EncodedSample([5, 6, 7, 8, 9], None, target), EncodedSample([5, 6, 8], None, target)]
    same, _ = terms(student, teacher, chosen, rows)
    assert same == pytest.approx(dict.fromkeys(same, 0.0), abs=1e-6)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(0.9)
    other, _ = terms(student, teacher, chosen, rows)
    assert all(value > 1e-6 for value in other.values()), other
    kinds = list(chosen.losses.inner_weights())
    stacks = ["encoder_layers", "decoder_layers"]
    names = [f"{kind}.{stack}" for kind in kinds for stack in stacks]
    assert set(other) == set(names if FAMILIES[family].architecture == "seq2seq" else kinds)


@pytest.mark.parametrize(("losses", "student", "code", "numbers"), [
    ({"attention": 1}, {"num_attention_heads": 2}, "heads-mismatch", ("2", "4")),
    ({"cosine": 1}, {"hidden_size": 16}, "width-mismatch", ("32", "16")),
])  # fmt: skip
def test_incompatible_heads_or_widths_are_rejected(tmp_path, losses, student, code, numbers):
    teacher, other = bert(tmp_path / "t", 0), bert(tmp_path / "s", 0, **student)
    with raises_code(code, InputError) as caught:
        make_inner_losses(other, teacher, settings(losses), 0)
    assert caught.value.setting == f"losses.{next(iter(losses))}"
    assert all(number in str(caught.value) for number in numbers)


def test_unknown_layers_and_indivisible_heads_are_rejected(tmp_path):
    teacher, student = bert(tmp_path / "t", 0), bert(tmp_path / "s", 0)
    with raises_code("unknown-layer", InputError) as caught:
        make_inner_losses(student, teacher, settings({"hidden_states": 1}, layer_map={1: 5}), 0)
    assert caught.value.setting == "layer_map"
    assert "5" in str(caught.value)
    with raises_code("no-layer-mapped", InputError) as caught:
        make_inner_losses(student, teacher, settings({"attention": 1}, layer_map={0: 0}), 0)
    assert caught.value.setting == "layer_map"
    with raises_code("heads-do-not-divide", InputError) as caught:
        terms(student, teacher, settings({"self_attention_relations": 1}, relation_heads=5), TEXTS)
    assert caught.value.setting == "relation_heads"
    assert "32" in str(caught.value)
    mpnet, _ = load_model(every_family.model_with_layers("mpnet", 2))
    with raises_code("unreadable-attention", InputError) as caught:
        make_inner_losses(mpnet, mpnet, settings({"attention": 1}), 0)
    assert "mpnet" in str(caught.value)


def test_layerdrop_is_disabled_while_capturing():
    student, teacher = (load_model(every_family.model_with_layers("m2m_100", 2))[0] for _ in "ab")
    stacks = [module for module in student.modules() if "layerdrop" in vars(module)]
    for module in stacks:
        module.layerdrop = 0.9
    inner = make_inner_losses(student, teacher, settings(ALL), seed=3)
    rows = [EncodedSample([2, 5, 6, 7, 3], None, [4, 8, 9, 3])] * 3
    batch = collate(rows, student.config)
    student.train()
    objective = DistillObjective(teacher, settings(ALL), inner)
    for _ in range(8):
        with inner.capture():
            loss_terms = objective(student, batch)
        assert all(torch.isfinite(term.value) for term in loss_terms.values())
    assert len(stacks) == 2
    assert {module.layerdrop for module in stacks} == {0.9}
