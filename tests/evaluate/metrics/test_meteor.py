"""METEOR against nltk on a small WordNet."""

import pytest

from smelt.core.errors import MissingDependencyError
from smelt.evaluate.metrics import meteor
from smelt.evaluate.quality import score_texts
from tests.support.expected_errors import raises_code


class SmallWordNet:
    """Synonyms without the files of WordNet."""

    def synsets(self, token):
        names = {"kitten": ["cat", "kitty"]}.get(token, [])
        return [type("Synset", (), {"lemmas": lambda self: [_Lemma(name) for name in names]})()]


class _Lemma:
    def __init__(self, text):
        self.text = text

    def name(self):
        return self.text


def test_meteor_follows_the_published_formula(monkeypatch):
    import nltk.translate.meteor_score as theirs

    monkeypatch.setattr(meteor, "require_wordnet", lambda: None)
    monkeypatch.setattr(theirs.meteor_score, "__defaults__", _with_wordnet(theirs.meteor_score))
    score = score_texts(["meteor"], ["The kitten sat, here.", "no"], [["The cat sits, here.", "x"], ["yes"]])[
        "meteor"
    ]
    # all but "sat" match in two runs: "The kitten", ", here."; precision and recall are 5/6
    fmean, penalty = 5 / 6, 0.5 * (2 / 5) ** 3
    assert [row[0] for row in score.statistics.rows] == pytest.approx([(1 - penalty) * fmean, 0])
    assert score.value == pytest.approx(100 * (1 - penalty) * fmean / 2)


def test_meteor_tokenizes_sentences_as_word_tokenize(monkeypatch):
    import nltk.tokenize
    import nltk.translate.meteor_score as theirs

    monkeypatch.setattr(meteor, "require_wordnet", lambda: None)
    monkeypatch.setattr(theirs.meteor_score, "__defaults__", _with_wordnet(theirs.meteor_score))
    monkeypatch.setattr(nltk.data, "path", [])
    prediction, reference = "The cat sat on the mat. It slept.", "It slept on the mat. The cat sat."
    score = score_texts(["meteor"], [prediction], [[reference]])["meteor"]
    # the ten words of both, among them two full stops
    prediction_words = ["The", "cat", "sat", "on", "the", "mat", ".", "It", "slept", "."]
    reference_words = ["It", "slept", "on", "the", "mat", ".", "The", "cat", "sat", "."]
    assert score.value == pytest.approx(100 * theirs.meteor_score([reference_words], prediction_words))
    assert "sentences:punkt untrained" in score.signature.split("|")
    untrained = nltk.tokenize.PunktSentenceTokenizer()
    monkeypatch.setattr(nltk.tokenize, "_get_punkt_tokenizer", lambda language: untrained)
    assert nltk.tokenize.word_tokenize(prediction) == prediction_words


def test_meteor_uses_installed_punkt_parameters(tmp_path, monkeypatch):
    import nltk

    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    tokenizer, parameters = meteor.sentence_tokenizer()
    assert parameters == "english"
    assert tokenizer.tokenize("She saw Dr. Smith. He left.") == ["She saw Dr. Smith.", "He left."]


def _with_wordnet(function):
    return tuple(SmallWordNet() if "ordnet" in type(v).__name__.lower() or "Corpus" in type(v).__name__ else v
                 for v in function.__defaults__)  # fmt: skip


def test_missing_wordnet_error_contains_install_command(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    with raises_code("missing-wordnet", MissingDependencyError) as excinfo:
        score_texts(["meteor"], ["a"], [["a"]])
    assert "nltk.downloader wordnet" in str(excinfo.value)
