"""A teacher that was run once answers as the live one does, and is not run on what was kept of it."""

import contextlib
import json
import shutil
from dataclasses import replace

import pytest
import torch

from smelt.compress.distill import logit_cache
from smelt.compress.distill import logit_cache as cached_teacher
from smelt.compress.distill.logit_cache import teacher_inputs_fingerprint
from smelt.compress.distill.objective import DistillObjective, make_cached_teacher
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.core.errors import RunError
from smelt.core.stage_cache import StageCache
from smelt.core.store import Store
from smelt.data.splits import Columns, Example, Split
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.runtimes.images import read_processor
from smelt.tasks.encode_split import encode_split
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate
from smelt.training.extension import total_loss
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, embedders, images, tiny

ALL = 10**6
WHO = {"artifacts": ["a"]}
SHORT = {"batch_size": 5, "learning_rate": 3e-3, "precision": "fp32", "dropout": 0.0, "num_evals": 2}


def rows_of(task, folder):
    if task == "translation":
        return read_split(str(tiny.write_pairs(folder / "rows.jsonl")), task, Columns(), folder)
    if task == "language-modeling":
        return read_split(str(causal.write_lines(folder / "rows.txt")), task, Columns(), folder)
    texts = tuple(Example(text, label=i % 2) for i, text in enumerate(tiny.SENTENCES))
    if task == "text-classification":
        return Split("x", texts)
    return Split("x", tuple(replace(e, text_pair=e.text[::-1], label=None) for e in texts))


MODELS = {
    "translation": tiny.write_marian,
    "language-modeling": lambda folder, seed: causal.write_model(folder, "llama", seed),
    "text-classification": lambda folder, seed: tiny.write_bert(folder, seed=seed),
    "sentence-similarity": lambda folder, seed: embedders.write_embedder(folder, seed=seed),
}


def settings_of(top, task, **more):
    losses = {} if task == "sentence-similarity" else {"losses": {"logits": 0.7, "labels": 0.3}}
    return DistillSettings.model_validate(SHORT | losses | {"cache_logits": {"top_k": top}} | more)


@pytest.mark.parametrize("task", MODELS)
def test_full_cache_loss_and_gradients_equal_live_teacher(tmp_path, task):
    student, teacher = (load_model(MODELS[task](tmp_path / str(seed), seed))[0] for seed in (0, 1))
    ctx = harness.make_context(tmp_path / "out", task, rows_of(task, tmp_path))
    tokenizer = load_tokenizer(tmp_path / "0")
    rows = encode_split(ctx.data["train"], student.config, tokenizer, ctx)
    settings = settings_of(ALL, task)
    with contextlib.closing(make_cached_teacher(teacher, WHO, student, settings, ctx)) as answers:
        numbered, other = answers.prepare_samples(rows, rows[:3])
        for group in (numbered[4:8], other):
            batch = collate(group, student.config)
            slopes, values = [], []
            for cached in (answers, None):
                student.zero_grad()
                loss = total_loss(DistillObjective(teacher, settings, cached_teacher=cached)(student, batch))
                loss.backward()
                values.append(loss.item())
                slopes.append(
                    torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
                )
            exact = task not in ("translation", "language-modeling")  # those are kept as float16
            assert values[0] == pytest.approx(values[1], rel=1e-5 if exact else 2e-3)
            relative_difference = (slopes[0] - slopes[1]).norm() / slopes[1].norm()
            assert float(relative_difference) < (1e-5 if exact else 2e-3)


def test_cached_images_are_keyed_by_content(tmp_path, shop):
    """Rows of images have no token ids; other images, or other pixels of the same ones, are new rows."""
    runs = {}
    folder = images.write_model(tmp_path / "model", "vit")
    for name, first in (("a", 0), ("b", 20), ("again", 0)):
        (tmp_path / name).mkdir()
        rows = [{"image": f"{n}.png", "label": n % 2} for n in range(6)]
        for n in range(6):
            images.make_image(first + n).save(tmp_path / name / f"{n}.png")
        (tmp_path / name / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        split = read_split("rows.jsonl", images.TASK, Columns(), tmp_path / name)
        settings = DistillSettings.model_validate(SHORT | {"cache_logits": {"top_k": 8}, "max_steps": 2})
        ctx = harness.run_stage(
            Distill(),
            settings,
            folder,
            tmp_path / name / "out",
            images.TASK,
            split,
            cached_files=shop.cached_files,
        )
        runs[name] = ctx.details["cache_logits"]["rows_of_teacher"]
    assert runs == {"a": 6, "b": 6, "again": 0}
    row = encode_split(split, load_model(folder)[0].config, read_processor(folder), ctx)[0]
    other = replace(row, image=replace(row.image, processor=replace(row.image.processor, resample=0)))
    assert teacher_inputs_fingerprint([row]) != teacher_inputs_fingerprint([other])


@pytest.fixture
def lines():
    return []


@pytest.fixture
def shop(tmp_path, lines):
    return StageCache(Store(tmp_path / "store"), {"torch": "1"}, lines.append)


def test_teacher_computes_each_sample_once_across_runs(tmp_path, shop, monkeypatch):
    rows = rows_of("translation", tmp_path)
    runs = []
    ask = cached_teacher.CachedTeacher._run_teacher
    monkeypatch.setattr(
        cached_teacher.CachedTeacher,
        "_run_teacher",
        lambda me, rows, to: (runs.append(len(rows)), ask(me, rows, to)),
    )
    settings = settings_of(8, "translation", epochs=3, student={"decoder_layers": 1})
    source = tiny.write_marian(tmp_path / "model")

    def go(name, settings=settings):
        return harness.run_stage(
            Distill(), settings, source, tmp_path / name / "out", data=rows, cached_files=shop.cached_files
        )

    first = go("a").details["cache_logits"]
    assert runs == [len(rows)]  # of training and validation, which are the same here
    assert first["rows_of_teacher"] == len(rows)
    # three epochs, and three validations
    assert first["asked_rows"] == 6 * len(rows)
    assert first["hit_rate"] == pytest.approx(5 / 6, abs=1e-4)
    assert first["bytes"] == first["positions"] * (8 * (2 + 2) + 4)

    second = go("b", settings.model_copy(update={"learning_rate": 1e-4})).details["cache_logits"]
    assert (second["rows_of_teacher"], second["hit_rate"], runs) == (0, 1.0, [len(rows)])
    go("c", settings.model_copy(update={"temperature": 2.0}))  # another tail
    assert len(runs) == 2


def test_corrupted_cache_file_is_rebuilt(tmp_path, shop, lines):
    rows = rows_of("translation", tmp_path)
    source = tiny.write_marian(tmp_path / "model")
    settings = settings_of(8, "translation", max_steps=2, student={"decoder_layers": 1})

    def go(name):
        return harness.run_stage(
            Distill(), settings, source, tmp_path / name / "out", data=rows, cached_files=shop.cached_files
        )

    go("a")
    (values,) = (tmp_path / "store" / "kept").glob("*/values.npy")
    right = values.read_bytes()
    values.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert go("b").details["cache_logits"]["rows_of_teacher"] == len(rows)
    assert values.read_bytes() == right
    assert any("not those that were written; made again" in line for line in lines)
    assert go("c").details["cache_logits"]["rows_of_teacher"] == 0


def test_too_little_disk_space_is_rejected_before_writing(tmp_path, monkeypatch):
    rows = rows_of("translation", tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(logit_cache.shutil, "disk_usage", lambda path: usage)
    shop = StageCache(Store(tmp_path / "store"), {}, lambda text: None)
    settings = settings_of(8, "translation", max_steps=2)
    with raises_code("disk-full", RunError) as caught:
        harness.run_stage(
            Distill(),
            settings,
            tiny.write_marian(tmp_path / "m"),
            tmp_path / "o/out",
            data=rows,
            cached_files=shop.cached_files,
        )
    assert caught.value.setting == "cache_logits"
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
    assert not list((tmp_path / "store").glob("kept/*"))


def test_cache_key_ignores_labels_and_includes_texts(tmp_path):
    config = load_model(tiny.write_bert(tmp_path / "m"))[0].config
    words = load_tokenizer(tmp_path / "m")
    ctx = harness.make_context(tmp_path / "out", "text-classification")
    split = rows_of("text-classification", tmp_path)
    other = Split("x", tuple(replace(e, label=0) for e in split.examples))
    less = Split("x", split.examples[:-1])
    keys = [
        teacher_inputs_fingerprint(encode_split(rows, config, words, ctx)) for rows in (split, other, less)
    ]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@pytest.mark.quick
@pytest.mark.parametrize("losses", [{"logits": 0, "labels": 1}, {"logits": 1, "hidden_states": 1}])
def test_cache_logits_without_reusable_losses_is_rejected(tmp_path, losses):
    settings = DistillSettings.model_validate({"losses": losses, "cache_logits": {}})
    (error,) = Distill.check_rows(settings, "translation", {})
    assert (error.setting, error.code) == ("cache_logits", "nothing-to-store")
