"""Messages to the user as data: a code to compare, and a text that is safe to show.

Data, model folders and artifacts may come from anywhere. Their texts are shown in messages and reports,
where control characters could move a terminal's cursor or hide text, and Unicode's direction controls could
reverse the order of text ("Trojan Source", Boucher & Anderson 2021, arXiv:2111.00169). Letters of every
script are unchanged, including right-to-left ones.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

Severity = Literal["info", "warning", "error"]
_CODE_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Message:
    """A warning, an error or information about a run, a step or a plan.

    code: a slug that names the kind of message, such as `few-calibration-tokens`. Code and tests compare it,
        never the text.
    message: what happened, the value or place, what to do.
    severity: info; warning, if results may be worse than they look; error.
    step, setting, file, line: the place, if known.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid"
    }  # importing smelt imports no pydantic
    code: str
    message: str
    severity: Severity = "warning"
    step: str | None = None
    setting: str | None = None
    file: str | None = None
    line: int | None = None

    def __post_init__(self) -> None:
        if not _CODE_PATTERN.fullmatch(self.code):
            raise ValueError(f"a code consists of lower-case letters, digits and hyphens, got {self.code!r}")

    def __str__(self) -> str:
        location_prefix = self.file or ("line" if self.line is not None else "")
        line_suffix = "" if self.line is None else f":{self.line}" if self.file else f" {self.line}"
        location = f"{location_prefix}{line_suffix}"
        if re.match(rf"{re.escape(location)}(?!\w)", self.message):
            location = ""  # the text of an error already has it
        return ": ".join(text for text in (location, self.step or "", self.message) if text)

    def with_prefix(self, prefix: str) -> Message:
        """Return the same message with `prefix` before its text."""
        return replace(self, message=f"{prefix}{self.message}")


def warning(
    code: str,
    message: str,
    *,
    step: str | None = None,
    setting: str | None = None,
    file: str | None = None,
    line: int | None = None,
) -> Message:
    """Return a `Message` of severity `warning`."""
    return Message(code, message, step=step, setting=setting, file=file, line=line)


def error_message(
    code: str,
    message: str,
    *,
    setting: str | None = None,
    file: str | None = None,
    line: int | None = None,
) -> Message:
    """Return a `Message` of severity `error`: one of several errors of an error."""
    return Message(code=code, severity="error", message=message, setting=setting, file=file, line=line)


def info(code: str, message: str) -> Message:
    """Return a `Message` of severity `info`."""
    return Message(code, message, severity="info")


def message_codes(messages: Iterable[Message]) -> list[str]:
    """Return the codes of `messages`, in their order."""
    return [message.code for message in messages]


def messages_to_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return `messages` as JSON-able dictionaries, without unknown places."""
    return [
        {name: value for name, value in asdict(message).items() if value is not None} for message in messages
    ]


_KEPT_CONTROLS = frozenset("\n\t")
# Controls (Cc), halves of surrogate pairs (Cs), and format characters (Cf) that change direction; joiners,
# which Persian and emoji need, are kept.
BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Words that start with a vowel sound; in spelled-out names (mpnet, m2m_100, xlm), that of the letter.
_TAKES_AN = re.compile(r"[aeio]|u[lmp]|un(?!i|et)|[fhlmnrx](?![aeiouhlr])[\w]|[mnx]l", re.IGNORECASE)


# For `str.translate` of a text that has to be one field of a line.
CONTROL_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def escape_controls(text: str) -> str:
    r"""Return `text` with control and direction characters as escapes such as \x1b; not newline and tab."""
    if text.isprintable():
        return text
    return "".join(_escape(c) if _is_unsafe(c) else c for c in text)


def find_lone_surrogate(text: str) -> str | None:
    """Return the first unpaired surrogate in `text`, which tokenizers cannot process; else None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _is_unsafe(character: str) -> bool:
    if character in _KEPT_CONTROLS:
        return False
    return character in BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def with_article(name: object) -> str:
    """Return `name` with its article, by pronunciation: "an onnx", "an mpnet", "a roberta"."""
    return f"an {name}" if _TAKES_AN.match(str(name)) else f"a {name}"


def count_text(number: int, noun: str) -> str:
    """Return `1 sample`, `1,000 samples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Return a duration as text: 0.3 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60} h {minutes % 60} min"


def with_count(number: int, noun: str) -> str:
    """Return "1 text", "2 texts"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def hide_password(url: str) -> str:
    """Return a URL with *** instead of its password."""
    masked_url = re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url)
    return re.sub(r"(?i)(password=)[^&]*", r"\1***", masked_url)
