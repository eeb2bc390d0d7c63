"""Windows of running text whose tokens are masked."""

import numpy as np
import pytest

from smelt.data.splits import Example, Split, Windows
from smelt.models.checkpoint import load_tokenizer
from smelt.models.masked_windows import TokenMasker, cut_bidirectional_windows, fixed_masks
from tests.support.expected_errors import raises_code
from tests.support.models import causal, masked
from tests.support.models.tiny import SENTENCES

CLS_ID, SEP_ID = 2, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(masked.write_model(tmp_path_factory.mktemp("m") / "m"))


def split_of(*texts: str, length: int = 16) -> Split:
    return Split("t", tuple(Example(text) for text in texts), Windows(length=length, separator="\n"))


def test_windows_have_all_tokens_once_between_special_tokens(tokenizer):
    windows = cut_bidirectional_windows(split_of(*SENTENCES), tokenizer, 64)
    ids = [token for window in windows for token in window.ids[1:-1]]
    assert ids == tokenizer("\n".join(SENTENCES), add_special_tokens=False)["input_ids"]
    assert {len(window.ids) for window in windows[:-1]} == {16}
    for window in windows:
        first, *inner, last = window.ids
        assert (first, last) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert window.is_special == [True, *[False] * len(inner), True]


@pytest.mark.parametrize(
    ("texts", "length", "code"), [(["", ""], 16, "too-few-tokens"), (SENTENCES, 2, "window-too-short")]
)
def test_text_without_room_for_tokens_is_refused(tokenizer, texts, length, code):
    with raises_code(code):
        cut_bidirectional_windows(split_of(*texts, length=length), tokenizer, 64)


def test_tokenizer_without_mask_token_is_refused(tmp_path):
    with raises_code("missing-special-token"):
        TokenMasker(load_tokenizer(causal.write_model(tmp_path / "m", "gpt2")))


def test_masks_have_proportions_of_bert(tokenizer):
    """Devlin et al. 2019: 15 %, of these 80 % mask tokens, 10 % random tokens, 10 % unchanged."""
    ids = [CLS_ID, *[7] * 40_000, SEP_ID]
    is_special = [True, *[False] * 40_000, True]
    window = TokenMasker(tokenizer).mask(ids, is_special, (1, 2))
    inputs, labels = np.array(window.input_ids), np.array(window.labels)
    predicted = labels != -100
    assert not predicted[[0, -1]].any()
    assert (labels[predicted] == 7).all()
    assert (inputs[~predicted] == np.array(ids)[~predicted]).all()
    count = int(predicted.sum())
    assert count / 40_000 == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / 40_000) ** 0.5)
    mask_share = (inputs[predicted] == tokenizer.mask_token_id).mean()
    unchanged_share = (inputs[predicted] == 7).mean()
    deviation = 4 * (0.25 / count) ** 0.5
    # a random token is the mask token, or the token itself, once in the vocabulary
    assert mask_share == pytest.approx(0.8 + 0.1 / len(tokenizer), abs=deviation)
    assert unchanged_share == pytest.approx(0.1 + 0.1 / len(tokenizer), abs=deviation)


def test_masks_depend_on_key_alone(tokenizer):
    windows = cut_bidirectional_windows(split_of(*SENTENCES * 4), tokenizer, 64)
    masker = TokenMasker(tokenizer)
    every_window = fixed_masks(windows, masker)
    assert fixed_masks(windows[:2], TokenMasker(tokenizer)) == every_window[:2]
    ids, is_special = windows[0].ids, windows[0].is_special
    drawn = [masker.mask(ids, is_special, (1, number, 0)).labels for number in range(20)]
    assert drawn[3] == masker.mask(ids, is_special, (1, 3, 0)).labels
    assert len({tuple(labels) for labels in drawn}) > 10
