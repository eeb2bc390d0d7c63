"""Running text in windows: every token predicted once, bytes that add up."""

import gzip

import pytest
import torch

from smelt.core.errors import InputError
from smelt.data.splits import Columns, Split, Windows
from smelt.generation.generating_runners import window_nll
from smelt.models.checkpoint import load_tokenizer
from smelt.models.text_rules import cut_windows, join_texts, window_length
from smelt.runtimes.registry import open_folder
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import causal

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return causal.write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    causal.write_lines(folder / "t.txt", 2)
    return read_split("t.txt", "language-modeling", Columns(), folder)


def _cut(text, words, **windows):
    return cut_windows(Split(text.origin, text.examples, Windows(separator="\n", **windows)), words, 64)


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (64, None), (7, 1), (2, 2)])
def test_windows_score_every_token_once(text, words, length, stride):
    ids = words(join_texts(text))["input_ids"]
    windows = _cut(text, words, length=length, stride=stride)
    assert windows.ids[0].tolist() == ids[: length + 1]
    assert all(len(window) <= length + 1 for window in windows.ids)
    counted = [
        t for window, n in zip(windows.ids, windows.scored_tokens, strict=True) for t in window[-n:].tolist()
    ]
    assert counted == ids[1:]
    if stride and stride < length:  # each token but those of the first window has so much before it
        least = min(len(w) - n for w, n in zip(windows.ids[1:], windows.scored_tokens[1:], strict=True))
        assert least >= length - stride


def test_scored_bytes_equal_text_without_first_token(text, words):
    full_text = join_texts(text)
    first = words.decode(words(full_text)["input_ids"][:1])
    assert "ö" in full_text
    assert sum(_cut(text, words, length=9).scored_bytes) == len(full_text.encode()) - len(first.encode())


def test_joined_text_equals_plain_or_compressed_file(tmp_path):
    path = causal.write_lines(tmp_path / "t.txt", 1)
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    for name in ("t.txt", "t.txt.gz"):
        split = read_split(name, "language-modeling", Columns(), tmp_path)
        assert join_texts(split) + "\n" == path.read_text()
    (tmp_path / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert join_texts(read_split("r.jsonl", "language-modeling", Columns(), tmp_path)) == "one\n\ntwo"


def test_window_longer_than_model_is_rejected():
    assert window_length(Windows(), 64) == 64
    assert window_length(None, 10**9) == 1024
    with raises_code("window-too-long", InputError) as caught:
        window_length(Windows(length=65), 64)
    assert all(part in str(caught.value) for part in (" 65 ", " 64 "))
    with raises_setting_codes("settings-conflict") as caught:
        Windows(length=4, stride=5)
    assert all(part in str(caught.value) for part in ("5", "4"))


def test_short_or_empty_text_is_rejected(words, tmp_path):
    with raises_code("too-few-tokens", InputError):
        cut_windows(Split("x", (), Windows()), words, 64)
    (tmp_path / "e.txt").write_text("\n\n")
    with raises_code("empty-data", InputError):
        read_split("e.txt", "language-modeling", Columns(), tmp_path)
    with raises_code("unknown-file-type", InputError) as caught:
        read_split("e.txt", "translation", Columns(), tmp_path)
    assert "e.txt" in str(caught.value)


def test_fingerprint_depends_on_windows(text):
    first, second = (Split("a", text.examples, Windows(length=n)) for n in (8, 9))
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == Split("b", text.examples, Windows(length=8)).fingerprint
    assert first.take(2).windows == first.windows


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return causal.write_tokenizer(tmp_path_factory.mktemp("begun"), begin=True)


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (64, None), (7, 1), (2, 2), (3, 1)])
def test_every_window_starts_with_bos_if_tokenizer_adds_it(text, begun, length, stride):
    ids = begun(join_texts(text))["input_ids"]
    assert ids[0] == begun.bos_token_id
    windows = _cut(text, begun, length=length, stride=stride)
    assert {window[0] for window in windows.ids} == {begun.bos_token_id}
    assert {len(window) for window in windows.ids[:-1]} <= {length + 1}
    counted = [
        t for window, n in zip(windows.ids, windows.scored_tokens, strict=True) for t in window[-n:].tolist()
    ]
    assert counted == ids[1:]
    assert sum(windows.scored_bytes) == len(join_texts(text).encode())  # the first token has no text
    assert "bos:each window" in windows.signature
    for window, n in zip(windows.ids[1:], windows.scored_tokens[1:], strict=True):
        assert len(window) - n >= 2  # the first token, and one of the text before


def rolling(model, tokens, first, most):
    """Rolling log-likelihood as lm-evaluation-harness has it, nats: disjoint windows, one token of context.

    lm_eval.utils.get_rolling_token_windows(context_len=1) and make_disjoint_window, where `first` is before
    the first window; a tokenizer that begins texts has it before the others too, in place of context.
    """
    total, done = 0.0, 0
    while done < len(tokens):
        new = min(most if done == 0 else most - (first is not None), len(tokens) - done)
        context = [first] if done == 0 else [*([first] if first is not None else []), tokens[done - 1]]
        ids = torch.tensor([[*context, *tokens[done : done + new]]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0].log_softmax(-1)
        total += float(logits.gather(1, ids[0, 1:, None])[-new:].sum())
        done += new
    return total


@pytest.mark.parametrize("length", [16, 64])
def test_loss_equals_rolling_log_likelihood(text, tmp_path, length):
    folder = causal.write_model(tmp_path / "m", "llama")
    words = load_tokenizer(folder)
    with open_folder(folder, "torch") as runner:
        windows = _cut(text, words, length=length)
        nll = sum(window_nll(runner, windows))
        ids = words(join_texts(text))["input_ids"]
        expected = -rolling(runner.backend.model, ids[1:], ids[0], length)
    assert nll == pytest.approx(expected, rel=1e-5)
