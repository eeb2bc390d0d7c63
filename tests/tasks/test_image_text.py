"""Images with texts: rows, batches, losses and results equal transformers'."""

import json

import numpy as np
import pytest
import torch
import transformers

from smelt.data.splits import Columns
from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.families.registry import blocks_of
from smelt.models.image_text_model import embedding_width
from smelt.runtimes.image_text import (
    ImageTextBatch,
    match_probabilities,
    match_texts,
    read_image_text_processor,
)
from smelt.runtimes.registry import open_folder
from smelt.tasks.image_text import CAPTION_TEMPLATE, TASK, captions, class_embeddings
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate
from smelt.training.losses import label_objective
from tests.support.expected_errors import raises_code
from tests.support.models import image_text, images

FAMILIES = ["clip", "siglip"]


def read(folder, *rows, **columns):
    images.make_image(1).save(folder / "1.png")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"image": "1.png"} | row) + "\n" for row in rows))
    return read_split(str(path), TASK.name, Columns(**columns), folder)


@pytest.fixture(scope="module", params=FAMILIES)
def model_and_batch(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    image_text.write_model(folder / "m", request.param)
    split = image_text.read_pairs(image_text.write_pairs(folder / "rows.jsonl", 6))
    model, _ = load_model(folder / "m")
    samples, _ = TASK.encode(split, model.config, read_image_text_processor(folder / "m"), 0, None)
    return folder / "m", model, split, collate(samples, model.config)


def expected_output(folder, model, split, **options):
    """transformers' output for the texts of a split, padded as in training, with its own mask for CLIP."""
    tokenizer = load_tokenizer(folder)
    padding = "max_length" if model.config.model_type == "siglip" else "longest"
    texts = tokenizer(
        [e.text_pair for e in split.examples], padding=padding, max_length=image_text.MAX_LENGTH,
        return_tensors="pt",
    )  # fmt: skip
    mask = {} if padding == "max_length" else {"attention_mask": texts["attention_mask"]}
    pixels = read_image_text_processor(folder).images
    values = torch.from_numpy(np.stack([pixels(images.make_image(i)) for i in range(len(split))]))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=texts["input_ids"], pixel_values=values, **mask, **options)


def test_rows_have_captions_or_labels(tmp_path):
    split = read(tmp_path, {"text": "a cat"}, {"text": "a dog"})
    assert [(e.text_pair, e.label) for e in split.examples] == [("a cat", None), ("a dog", None)]
    split = read(tmp_path, {"label": "cat"}, {"label": 3})
    expected = [(CAPTION_TEMPLATE.format(label=label), label) for label in ("cat", "3")]
    assert [(e.text_pair, e.label) for e in split.examples] == expected
    split = read(tmp_path, {"caption": "my cat", "label": "cat"}, text="caption")
    assert [(e.text_pair, e.label) for e in split.examples] == [("my cat", "cat")]


def test_invalid_rows_are_named(tmp_path):
    with raises_code("missing-column"):
        read(tmp_path, {"caption": "a cat"})
    with raises_code("empty-text"):
        read(tmp_path, {"text": " "})
    with raises_code("wrong-column-type"):
        read(tmp_path, {"label": True})
    with raises_code("wrong-column-type"):
        read(tmp_path, {"text": ["a cat", "a cat"]})
    with raises_code("missing-file"):
        read(tmp_path, {"text": "a cat", "image": "2.png"})
    with raises_code("partly-missing-column"):
        read(tmp_path, {"label": "cat"}, {"text": "a cat"})


def test_candidates_are_for_predictions_only(tmp_path):
    split = read(tmp_path, {"text": ["a cat", "a dog"]})
    assert split.examples[0].choices == ("a cat", "a dog")
    with raises_code("missing-captions"):
        captions(split)


def test_batch_and_embeddings_equal_transformers(model_and_batch):
    folder, model, split, batch = model_and_batch
    expected = expected_output(folder, model, split)
    assert embedding_width(model.config.to_dict()) == expected.image_embeds.shape[1]
    if model.config.model_type == "siglip":
        assert batch["input_ids"].shape[1] == image_text.MAX_LENGTH
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
    for name in ("image_embeds", "text_embeds", "logits_per_image"):
        assert torch.allclose(getattr(output, name), getattr(expected, name), atol=1e-5), name
    with open_folder(folder, "torch") as runner:
        vectors = runner.forward(ImageTextBatch(batch["pixel_values"].numpy(), batch["input_ids"].numpy()))
    assert np.allclose(vectors, torch.cat([expected.image_embeds, expected.text_embeds]), atol=1e-5)


def test_loss_equals_transformers(model_and_batch):
    folder, model, split, batch = model_and_batch
    expected = expected_output(folder, model, split, return_loss=True).loss
    loss = label_objective()(model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert model.logit_scale.grad.abs() > 0
    model.zero_grad()


def test_probabilities_equal_transformers(model_and_batch):
    folder, model, split, _ = model_and_batch
    texts = [e.text_pair for e in split.examples][:4]
    expected = expected_output(folder, model, split).logits_per_image[:, :4]
    rule = torch.sigmoid if model.config.model_type == "siglip" else lambda x: x.softmax(dim=1)
    with open_folder(folder, "torch") as runner:
        matches = match_texts(runner, [e.text for e in split.examples], texts, batch_size=4)
        with raises_code("repeated-text"):
            match_texts(runner, [split.examples[0].text], ["a cat", "a cat"])
        examples = [TASK.parse_argument("\t".join([split.examples[0].text, *texts]))]
        [result] = TASK.predict(runner, examples, GenerationSettings(), 4)
    for row, match in zip(rule(expected).tolist(), matches, strict=True):
        assert [match[text] for text in texts] == pytest.approx(row, rel=1e-4)
        assert list(match.values()) == sorted(match.values(), reverse=True)
    assert result == pytest.approx(matches[0])


def test_both_towers_have_blocks(model_and_batch):
    _, model, _, _ = model_and_batch
    stacks = [block.stack.name for block in blocks_of(model)]
    assert stacks == ["vision_layers"] * 2 + ["text_layers"] * 2
    assert [block.stack.causal for block in blocks_of(model)][2:] == [model.config.model_type == "clip"] * 2


def test_several_captions_of_a_label_are_averaged():
    vectors = np.eye(3)[[0, 1, 1, 2]]
    names, prototypes = class_embeddings(["b", "b", "b", "a"], ["x", "y", "y", "z"], vectors)
    assert names == ["a", "b"]
    assert np.allclose(prototypes, [[0, 0, 1], [0.5, 0.5, 0]])  # equal captions count once


def test_probabilities_of_large_logits_are_finite():
    values = match_probabilities(np.array([1.0, -1.0]), 1000.0, None)
    assert values.tolist() == [1.0, 0.0]
    assert match_probabilities(np.array([0.0]), 10.0, 0.0).tolist() == [0.5]
