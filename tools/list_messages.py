"""List every message of the source with its code.

`python tools/list_messages.py` writes tests/house/messages.

One page per package, one line per message: code, severity or kind of error, text with `{}` for values. The
pages keep the wording reviewable in one place; nothing but their own test depends on it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "tests" / "house" / "messages"
PACKAGES = ("smelt", "compress", "export", "evaluate")
ERRORS = (
    *("SmeltError", "InputError", "RunError", "ParityError", "MissingDependencyError", "SettingError"),
    *("ValueError", "GraphFileError"),
)
# functions that create messages: severity, and positions of code and text
MAKERS = {
    "warn": ("warning", 0, 1),
    "warning": ("warning", 0, 1),
    "error_message": ("error", 0, 1),
    "info": ("info", 0, 1),
}
COLLECTORS = ("add", "say")  # of `smelt.pipeline.recipe.validation_errors.RecipeErrors`


class Found(NamedTuple):
    """A message in the source: place, kind, code (None if it has none) and text."""

    place: str
    kind: str
    code: str | None
    text: str


def messages_in(path: Path) -> Iterator[Found]:
    """Yield the warnings and errors in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = _LocalTexts(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        location = f"{path.relative_to(ROOT)}:{node.lineno}"
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        code = keywords.get("code")
        if name in MAKERS and len(node.args) >= 2:
            kind, code_index, of_text = MAKERS[name]
            yield Found(location, kind, _code(node.args[code_index]), texts.of(node.args[of_text]))
        elif name in ERRORS and node.args:
            yield Found(location, name, _code(code), texts.of(node.args[0]))
        elif name in COLLECTORS and _owner(node) == "errors" and node.args:
            text = node.args[1] if name == "add" and len(node.args) > 1 else node.args[0]
            yield Found(location, "error", _code(code), texts.of(text))


def _owner(call: ast.Call) -> str:
    """Return the last name of the object that a method is called on."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")


def _code(node: ast.expr | None) -> str | None:
    """Return a literal code; `{}` if it is computed."""
    if node is None:
        return None
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


class _LocalTexts:
    """The texts of expressions in a file, with `{}` for values; a name has the last text assigned to it."""

    def __init__(self, tree: ast.AST) -> None:
        self._functions = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._assigned = [
            (node.lineno, node.targets[0].id, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]

    def of(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.of(part) for part in node.values)
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
            return self.of(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.of(node.left) + self.of(node.right)
        if isinstance(node, ast.Name):
            start = max((line for line in self._functions if line < node.lineno), default=0)
            before = [
                (line, value)
                for line, name, value in self._assigned
                if name == node.id and start < line < node.lineno
            ]
            text = max(before, default=(0, None), key=lambda entry: entry[0])[1]
            if isinstance(text, ast.JoinedStr) or (isinstance(text, ast.Constant) and text.value):
                return self.of(text)
        return "{}"


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    out = {}
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"))
        lines = {
            f"{message.code}  {message.kind}  {message.text}"
            for file in files
            for message in messages_in(file)
        }
        out[f"{package}.txt"] = "\n".join(line.replace("\n", "\\n") for line in sorted(lines)) + "\n"
    return out


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
