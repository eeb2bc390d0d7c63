"""BLEU's tokenizer by language and script, against sacrebleu's own choice and numbers."""

import pytest
from sacrebleu.metrics.bleu import BLEU

from smelt.core.errors import InputError
from smelt.data.bleu_tokenizer import bleu_tokenizer
from tests.support.expected_errors import raises_code

CHINESE = ["一个男人在街上骑自行车。", "两只狗在草地上奔跑。", "孩子们在河边玩耍。"]
JAPANESE = [
    "男の人が自転車に乗っています。",
    "二匹の犬が草の上を走っている。",
    "子供たちが川辺で遊んでいる。",
]
KOREAN = ["한 남자가 거리에서 자전거를 타고 있다.", "두 마리의 개가 풀밭에서 뛰고 있다."]
THAI = ["ผู้ชายคนหนึ่งกำลังขี่จักรยาน", "สุนัขสองตัวกำลังวิ่งบนหญ้า"]
GERMAN = ["Ein Mann fährt Fahrrad.", "Zwei Hunde rennen über das Gras."]
OTHERS = {"lao": ["ຜູ້ຊາຍຂີ່ລົດຖີບ"], "khmer": ["បុរសម្នាក់ជិះកង់"], "burmese": ["လူတစ်ယောက်စက်ဘီးစီးနေသည်"]}


@pytest.fixture(autouse=True)
def _without_mecab(monkeypatch):
    monkeypatch.setattr("smelt.data.bleu_tokenizer._is_installed", lambda name: "mecab" not in name)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (CHINESE, "zh"),
        (JAPANESE, "char"),
        (KOREAN, "char"),
        (THAI, "char"),
        (GERMAN, "13a"),
        (["12 + 3"], "13a"),
    ]
    + [(texts, "char") for texts in OTHERS.values()],
)
def test_script_selects_tokenizer(texts, expected):
    assert bleu_tokenizer(texts) == expected


@pytest.mark.parametrize("language", ["zh", "ja", "ko", "de", "fr"])
def test_language_selects_tokenizer_as_in_sacrebleu(language, monkeypatch):
    monkeypatch.setattr("smelt.data.bleu_tokenizer._is_installed", lambda name: True)
    assert bleu_tokenizer(GERMAN, language=language) == BLEU._TOKENIZER_MAP.get(language, "13a")


@pytest.mark.parametrize("code", ["zho_Hans", "zh_CN", "cmn_Hant"])
def test_language_codes_of_multilingual_models_are_recognized(code):
    assert bleu_tokenizer(["ok"], language=code) == "zh"


def test_latin_names_do_not_change_chinese_tokenizer():
    assert bleu_tokenizer(["微软的 Windows 和 Office 软件很流行。"]) == "zh"
    assert bleu_tokenizer(["The sign said 出口, which means exit, and we all left the building."]) == "13a"


def test_each_reference_counts_once_regardless_of_length():
    english = [" ".join(["The quick brown fox jumps over the lazy dog."] * 20)] * 3
    assert bleu_tokenizer([*english, *CHINESE]) == "zh"
    assert bleu_tokenizer([*english, *JAPANESE]) == "char"
    assert bleu_tokenizer([*english * 10, CHINESE[0]]) == "13a"
    with raises_code("bleu-tokenizer", InputError):
        bleu_tokenizer([*english, *CHINESE], "13a")


def test_references_without_letters_do_not_count_and_unspaced_scripts_are_summed():
    assert bleu_tokenizer([*["2024-05-01", ""] * 40, *CHINESE]) == "zh"
    assert bleu_tokenizer([*GERMAN * 7, *CHINESE[:2], *THAI]) == "char"
    assert bleu_tokenizer([*KOREAN, *GERMAN]) == "char"
    assert bleu_tokenizer(["12 \u0e3f"]) == "13a"  # baht
    assert bleu_tokenizer(["\u7ea6\u7ff0\u30fb\u53f2\u5bc6\u65af\u8bf4"]) == "zh"  # a name with a middle dot


def test_tokenizer_that_splits_most_references_is_accepted():
    assert bleu_tokenizer([*GERMAN * 4, *CHINESE], "13a") == "13a"


def test_tokenizer_requiring_download_is_rejected(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr("smelt.data.bleu_tokenizer._FLORES_MODEL", tmp_path / "flores200sacrebleuspm")
    with raises_code("bleu-tokenizer", InputError):
        bleu_tokenizer(GERMAN, "flores200")
    (tmp_path / "flores200sacrebleuspm").touch()
    assert bleu_tokenizer(GERMAN, "flores200") == "flores200"


@pytest.mark.parametrize("tokenize", ["13a", "intl"])
@pytest.mark.parametrize("texts", [CHINESE, JAPANESE, THAI, *OTHERS.values()])
def test_tokenizer_that_cannot_split_is_rejected(tokenize, texts):
    with raises_code("bleu-tokenizer", InputError):
        bleu_tokenizer(texts, tokenize)


def test_korean_is_split_at_spaces_and_uninstalled_tokenizer_is_rejected():
    assert bleu_tokenizer(KOREAN, "13a") == "13a"
    with raises_code("bleu-tokenizer", InputError):
        bleu_tokenizer(JAPANESE, "ja-mecab")
