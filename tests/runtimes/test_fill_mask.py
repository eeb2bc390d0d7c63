"""Predictions of masked tokens, compared with transformers."""

import numpy as np
import pytest
import torch
import transformers

from smelt.models.checkpoint import load_tokenizer
from smelt.models.masked_windows import MaskedWindow
from smelt.runtimes.fill_mask import fill_masks, require_mask_tokens, score_masked_tokens
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.models import masked
from tests.support.models.tiny import SENTENCES

FIRST = SENTENCES[0].split()
ONE_MASK, TWO_MASKS = f"{FIRST[0]} {{0}} {FIRST[1]}", f"{{0}} {FIRST[0]} {{0}}"


@pytest.mark.parametrize("family", ["bert", "roberta", "albert"])
def test_predictions_equal_pipeline_of_transformers(tmp_path, family):
    folder = masked.write_model(tmp_path / "m", family)
    tokenizer = load_tokenizer(folder)
    texts = [text.format(tokenizer.mask_token) for text in (ONE_MASK, TWO_MASKS)]
    pipeline = transformers.pipeline("fill-mask", str(folder), device="cpu")
    with open_folder(folder, "torch") as runner:
        results = fill_masks(runner, texts, batch_size=2, top_k=3)
    for text, result in zip(texts, results, strict=True):
        expected = pipeline(text, top_k=3)
        expected = [expected] if isinstance(expected[0], dict) else expected
        assert len(result) == len(expected)
        for predictions, expected_predictions in zip(result, expected, strict=True):
            for prediction, reference in zip(predictions, expected_predictions, strict=True):
                assert prediction._asdict() == reference | {
                    "score": pytest.approx(reference["score"], rel=1e-4)
                }


def test_text_without_mask_token_is_refused(tmp_path):
    with (
        open_folder(masked.write_model(tmp_path / "m"), "torch") as runner,
        raises_code("missing-mask-token"),
    ):
        require_mask_tokens(runner, [SENTENCES[0]])


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_text_with_truncated_mask_is_refused(tmp_path, family):
    """The limit is that of the tokens: the same mask near the beginning is kept."""
    folder = masked.write_model(tmp_path / "m", family)
    mask = load_tokenizer(folder).mask_token
    with open_folder(folder, "torch") as runner:
        words = " ".join([FIRST[0]] * runner.text.max_input_length)
        require_mask_tokens(runner, [f"{mask} {words}"])
        for text in (f"{words} {mask}", f"{mask} {words} {mask}"):
            with raises_code("truncated-mask-token"):
                require_mask_tokens(runner, [text])


def test_losses_equal_transformers(tmp_path):
    folder = masked.write_model(tmp_path / "m")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    rng = np.random.default_rng(0)
    windows = []
    for length in (9, 12, 12):
        labels = np.where(rng.random(length) < 0.4, rng.integers(5, 20, length), -100)
        windows.append(MaskedWindow(rng.integers(5, 20, length).tolist(), labels.tolist()))
    windows.append(MaskedWindow([5, 6], [-100, -100]))
    with open_folder(folder, "torch") as runner:
        scores = score_masked_tokens(runner, windows, batch_size=2)
    for index, window in enumerate(windows[:-1]):
        labels = torch.tensor([window.labels])
        with torch.no_grad():
            out = model(torch.tensor([window.input_ids]), labels=labels)
        count = int((labels != -100).sum())
        assert scores.losses[index] == pytest.approx(float(out.loss) * count, rel=1e-5)
        assert scores.tokens[index] == count
        assert scores.correct[index] == int((out.logits.argmax(-1) == labels).sum())
    assert (scores.losses[-1], scores.tokens[-1], scores.correct[-1]) == (0.0, 0, 0)
