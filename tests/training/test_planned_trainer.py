"""The loop against what it promises: one update's gradient, rate, norm and decay, recomputed by hand."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.objective import DistillObjective
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.data.labels import MULTI_LABEL, REGRESSION
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.tasks.samples import EncodedSample, collate
from smelt.training import trainer as training_loop
from smelt.training.extension import total_loss
from smelt.training.losses import label_objective
from smelt.training.trainer import run_training
from tests.support import harness
from tests.support.models import causal, classifiers, seq2seq, tiny

PLAIN = {
    "precision": "fp32", "dropout": 0.0, "num_evals": 0, "lr_scheduler_type": "constant", "warmup_steps": 0,
}  # fmt: skip
MADE = {
    "marian": tiny.write_marian, "t5": seq2seq.write_t5, "distilbert": classifiers.distilbert,
    "roberta": classifiers.roberta, "gpt2": lambda folder: causal.write_model(folder, "gpt2"),
    "llama": lambda folder: causal.write_model(folder, "llama"),
}  # fmt: skip


def context(folder, **more):
    return harness.make_context(folder / "work" / "out", **({"seed": 5} | more))


def ids(draw, least, most):
    return [draw.randint(5, 40) for _ in range(draw.randint(least, most))]


def rows_for(kind, count=16):
    """Rows of very different lengths, so that a mean of the batches' means is far from the mean of all."""
    draw = random.Random(2)
    if kind == "translator":
        return [EncodedSample(ids(draw, 2, 20), None, [*ids(draw, 1, 30), 0]) for _ in range(count)]
    if kind == "language model":
        return [EncodedSample(ids(draw, 3, 60), None, None) for _ in range(count)]
    targets = {
        "classes": lambda i: i % 2,
        "class sets": lambda i: (float(i % 2), float(i % 3 == 0)),
        "numbers": lambda i: (0.3 * i,),
    }
    return [EncodedSample(ids(draw, 3, 20), None, targets[kind](i)) for i in range(count)]


def model_for(kind, folder):
    if kind == "translator":
        return load_model(tiny.write_marian(folder))[0]
    if kind == "language model":
        return load_model(causal.write_model(folder, "llama"))[0]
    config = {
        "classes": {},
        "class sets": {"problem_type": MULTI_LABEL},
        "numbers": {"labels": 1, "problem_type": REGRESSION},
    }
    return load_model(tiny.write_bert(folder, **config[kind]))[0]


def trained(model, rows, folder, objective=None, **settings):
    """Train a little; return each trained parameter's last whole gradient, before it is clipped."""
    gradients, hooks = {}, []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: gradients.__setitem__(name, p.grad.detach().clone())
                )
            )
    ctx = context(folder)
    run_training(
        model, rows, None, objective=objective or label_objective(), ctx=ctx,
        settings=FinetuneSettings(**(PLAIN | settings)),
    )  # fmt: skip
    for hook in hooks:
        hook.remove()
    return gradients, ctx


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)]).double()


@pytest.mark.parametrize(
    ("kind", "taught"),
    [("translator", False), ("translator", True), ("language model", True), ("classes", False),
     ("class sets", True), ("numbers", False)],
)  # fmt: skip
def test_gradient_accumulation_equals_one_large_batch(tmp_path, kind, taught):
    folder = tmp_path / "model"
    rows, model = rows_for(kind), model_for(kind, folder)
    objective = label_objective()
    if taught:
        teacher, _ = load_model(folder)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.9)
        objective = DistillObjective(teacher, DistillSettings(losses={"logits": 0.7, "labels": 0.4}))
    if kind == "classes":  # a batch that is smaller than the others
        rows = rows[:-3]
    accumulated, _ = trained(
        model, rows, tmp_path / "4", objective, max_steps=1, batch_size=4, gradient_accumulation_steps=4
    )
    full_gradients, _ = trained(
        load_model(folder)[0], rows, tmp_path / "1", objective, max_steps=1, batch_size=16
    )
    expected = flat(full_gradients)
    assert float(expected.norm()) > 1e-3
    assert float((flat(accumulated) - expected).norm() / expected.norm()) < 1e-5
    if kind in ("translator", "language model"):
        naive = mean_of_means(load_model(folder)[0], rows, objective)
        assert float((naive - expected).norm() / expected.norm()) > 0.05, (
            "the test could not see the difference"
        )


def mean_of_means(model, rows, objective):
    order = sorted(range(len(rows)), key=lambda i: rows[i].token_counts)
    for start in range(0, len(rows), 4):
        batch = collate([rows[i] for i in order[start : start + 4]], model.config)
        (total_loss(objective(model, batch)) / 4).backward()
    return flat({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def test_last_update_averages_remaining_batches_only(tmp_path):
    folder = tmp_path / "model"
    rows, model = rows_for("translator", 12), model_for("translator", folder)
    batches = []

    def objective(m, batch):
        batches.append(batch)
        return label_objective()(m, batch)

    settings = {"learning_rate": 1e-12, "weight_decay": 0.0, "batch_size": 4}
    last, ctx = trained(
        model, rows, tmp_path / "a", objective, gradient_accumulation_steps=2, epochs=1, **settings
    )
    assert (ctx.details["training"]["steps"], len(batches)) == (2, 3)
    fresh, _ = load_model(folder)
    label_objective()(fresh, batches[-1]).backward()
    del last["model.shared.weight"]  # Marian's row of pad is held where it is
    expected = {n: p.grad for n, p in fresh.named_parameters() if n in last}
    torch.testing.assert_close(flat(last), flat(expected), rtol=1e-3, atol=1e-5)


def test_train_loss_is_mean_over_tokens_not_batches(tmp_path):
    folder = tmp_path / "model"
    rows, model = rows_for("translator"), model_for("translator", folder)
    settings = {
        "learning_rate": 1e-12,
        "weight_decay": 0.0,
        "batch_size": 4,
        "gradient_accumulation_steps": 4,
    }
    _, ctx = trained(model, rows, tmp_path / "a", max_steps=1, **settings)
    full_loss = float(label_objective()(load_model(folder)[0], collate(rows, model.config)).detach())
    assert ctx.details["training"]["train_loss"] == pytest.approx(full_loss, rel=1e-5)


@pytest.fixture
def steps(monkeypatch):
    """What the optimizer was given at every update: the rate and the norm of all gradients."""
    updates, real = [], torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        norms = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        updates.append((self.param_groups[0]["lr"], float(torch.stack(norms).norm())))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return updates


@pytest.mark.parametrize(("schedule", "after", "warmup"), [
    ("linear", lambda done: 1 - done, 4), ("cosine", lambda done: 0.5 * (1 + math.cos(math.pi * done)), 0.4),
    ("constant", lambda done: 1.0, 4),
])  # fmt: skip
def test_learning_rate_follows_warmup_and_schedule(tmp_path, steps, schedule, after, warmup):
    model = model_for("classes", tmp_path / "model")
    settings = {"max_steps": 10, "lr_scheduler_type": schedule, "learning_rate": 0.002}
    trained(model, rows_for("classes"), tmp_path / "a", batch_size=4, warmup_steps=warmup, **settings)
    expected = [0.002 * (step / 4 if step < 4 else after((step - 4) / 6)) for step in range(10)]
    assert [rate for rate, _ in steps] == pytest.approx(expected, abs=1e-9)


def test_first_step_without_warmup_has_full_rate(tmp_path, steps):
    model = model_for("classes", tmp_path / "model")
    trained(model, rows_for("classes"), tmp_path / "a", max_steps=1, learning_rate=0.002)
    assert steps[0][0] == 0.002


def test_gradients_are_clipped_to_max_grad_norm(tmp_path, steps):
    folder = tmp_path / "model"
    rows = rows_for("translator")
    free, _ = trained(model_for("translator", folder), rows, tmp_path / "a", max_steps=1, max_grad_norm=1e9)
    trained(load_model(folder)[0], rows, tmp_path / "b", max_steps=1, max_grad_norm=0.01)
    (_, full_norm), (_, clipped_norm) = steps
    assert full_norm == pytest.approx(float(flat(free).norm()), rel=1e-3)
    assert full_norm > 0.1
    assert clipped_norm == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("family", MADE)
def test_weight_decay_excludes_biases_and_norms(tmp_path, family):
    """With a gradient of zero AdamW moves nothing but by its decay, which is rate times weight decay."""
    model, _ = load_model(MADE[family](tmp_path / "model"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5)  # biases begin at zero, which no decay changes
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kind = "language model" if family in causal.FAMILIES else "translator"
    rows = rows_for("classes" if family in classifiers.MAKERS else kind, 4)

    def nothing(m, batch):
        return 0.0 * label_objective()(m, batch)

    trained(model, rows, tmp_path / "a", nothing, max_steps=1, learning_rate=0.1, weight_decay=0.5)
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.dim() > 1 and name not in fixed and "bias" not in name else 1.0
        torch.testing.assert_close(
            parameter.detach(), before[name] * factor, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_label_smoothing_applies_to_training_only(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    rows = [EncodedSample([2, 7, 8, 3], None, 1), EncodedSample([2, 9, 3], None, 0)]
    calls = []
    monkeypatch.setattr(
        training_loop, "run_training", lambda *args, objective, **more: calls.append((args[0], objective))
    )
    data = {"train": Split("x", (Example("a man walks", label=1),))}
    ctx = context(tmp_path, task="text-classification", data=data)
    Finetune()(
        tiny.as_artifact(tiny.write_bert(folder), "text-classification"),
        FinetuneSettings(label_smoothing_factor=0.3),
        ctx,
    )
    ((model, objective),) = calls
    batch = collate(rows, model.config)
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    for training, smoothing in ((False, 0.0), (True, 0.3)):
        model.train(training)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        expected = F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)
        torch.testing.assert_close(objective(model, batch), expected)


@pytest.mark.parametrize(
    ("rows", "dropout"), [(10, 0.0), (1, 0.3)], ids=["which rows share a batch", "what dropout drops"]
)
def test_same_seed_gives_same_weights(tmp_path, rows, dropout):
    folder = tiny.write_bert(tmp_path / "model")
    examples = tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES[:rows]))
    written = []
    for index, seed in enumerate((1, 1, 2)):
        data = {"train": Split("x", examples)}
        ctx = context(tmp_path / str(index), task="text-classification", data=data, seed=seed, threads=1)
        settings = FinetuneSettings(
            max_steps=3, batch_size=4, precision="fp32", learning_rate=1e-3, dropout=dropout
        )
        torch.rand(index)  # what was drawn before does not matter
        Finetune()(tiny.as_artifact(folder, "text-classification"), settings, ctx)
        written.append((ctx.out / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]
