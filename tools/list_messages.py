"""List every message of the source with its code.

`python tools/list_messages.py` writes tests/house/messages.

One page per package, one line per message: code, severity or kind of error, text with `{}` for values. Texts
of constants, variables and functions are shown in full; messages that only pass another one on are left out.
The pages keep the wording reviewable in one place; nothing but their own test depends on it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
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
MAX_DEPTH = 4  # of variables and functions that contain a text
COLLECTORS = ("add", "say")  # of `smelt.pipeline.recipe.validation_errors.RecipeErrors`


class ListedMessage(NamedTuple):
    """A message in the source: location, kind, code (None if it has none) and text."""

    location: str
    kind: str
    code: str | None
    text: str


def messages_in(path: Path) -> Iterator[ListedMessage]:
    """Yield the warnings and errors in a file, each with every text that it may have."""
    texts = _Texts(path)
    for node in _nodes(path):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        location = f"{path.relative_to(ROOT)}:{node.lineno}"
        code = next((keyword.value for keyword in node.keywords if keyword.arg == "code"), None)
        text: ast.expr | None = None
        if name in MAKERS and len(node.args) >= 2:
            kind, code_index, text_index = MAKERS[name]
            code, text = node.args[code_index], node.args[text_index]
        elif name in ERRORS and node.args:
            kind, text = name, node.args[0]
        elif name in COLLECTORS and _owner(node) == "errors" and node.args:
            kind, text = "error", node.args[1 if name == "add" and len(node.args) > 1 else 0]
        if text is None:
            continue
        code_text = _code(code)
        for sentence in texts.of(text):
            if code_text != "{}" or _has_words(sentence):
                yield ListedMessage(location, kind, code_text, sentence)


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a module; the first is the module."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _name(node: ast.expr) -> str:
    """Return the last name of a dotted expression; "" if it is none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _has_words(text: str) -> bool:
    """Return whether a text says more than its values."""
    return re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", text)) is not None


def _owner(call: ast.Call) -> str:
    """Return the last name of the object that a method is called on."""
    return _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _code(node: ast.expr | None) -> str | None:
    """Return a literal code; `{}` if it is computed."""
    if node is None:
        return None
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


class _Definitions(NamedTuple):
    """What the names of a module stand for: constants, and what each function returns or yields."""

    constants: dict[str, ast.expr]
    functions: dict[str, list[ast.expr]]


@cache
def _definitions(path: Path) -> _Definitions:
    constants = {
        node.targets[0].id: node.value
        for node in ast.iter_child_nodes(_nodes(path)[0])
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    functions: dict[str, list[ast.expr]] = defaultdict(list)
    for function in _nodes(path):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                    functions[function.name].append(node.value)
    return _Definitions(constants, functions)


@cache
def _project() -> _Definitions:
    """Return the definitions of all modules; of functions those whose name is the only one."""
    modules = [_definitions(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    counts = Counter(name for module in modules for name in module.functions)
    return _Definitions(
        {name: value for module in modules for name, value in module.constants.items()},
        {
            name: values
            for module in modules
            for name, values in module.functions.items()
            if counts[name] == 1
        },
    )


class _Texts:
    """The texts of expressions in a file, with `{}` for values; a name has the last text assigned to it."""

    def __init__(self, path: Path) -> None:
        self._module = _definitions(path)
        self._functions = [node.lineno for node in _nodes(path) if isinstance(node, ast.FunctionDef)]
        self._assigned: dict[str, list[tuple[int, ast.expr]]] = defaultdict(list)
        for node in _nodes(path):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._assigned[node.targets[0].id].append((node.lineno, node.value))
            elif isinstance(node, ast.NamedExpr):
                self._assigned[node.target.id].append((node.lineno - 1, node.value))
            elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
                self._assigned[node.target.id].append((node.target.lineno - 2, node.iter))

    def of(self, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the texts that an expression may have."""
        match node:
            case ast.Constant(str(value)) if value:
                return [value]
            case ast.JoinedStr(values):
                return _joined([self.of(value, depth) for value in values])
            case ast.BinOp(left, ast.Add(), right):
                return _joined([self.of(left, depth), self.of(right, depth)])
            case ast.FormattedValue(value):
                return self.of(value, depth)
        return self._all(self._sources_of(node), depth)

    def _sources_of(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions that an expression may have the value of."""
        match node:
            case ast.IfExp():
                return [node.body, node.orelse]
            case ast.Name():
                return self._values_of(node)
            case ast.Call():
                name = _name(node.func)
                return self._module.functions.get(name) or _project().functions.get(name, [])
        return []

    def _values_of(self, name: ast.Name) -> list[ast.expr]:
        """Return what was last assigned to a name, or the constant of this name."""
        start = max((line for line in self._functions if line < name.lineno), default=0)
        before = [entry for entry in self._assigned[name.id] if start < entry[0] < name.lineno]
        if before:
            return [max(before, key=lambda entry: entry[0])[1]]
        value = self._module.constants.get(name.id) or _project().constants.get(name.id)
        return [] if value is None else [value]

    def _all(self, nodes: list[ast.expr], depth: int) -> list[str]:
        """Return the texts of several expressions that have words; `{}` if none has."""
        if depth > MAX_DEPTH:
            return ["{}"]
        texts = [text for node in nodes for text in self.of(node, depth + 1) if _has_words(text)]
        return list(dict.fromkeys(texts)) or ["{}"]


def _joined(parts: list[list[str]]) -> list[str]:
    """Return the texts of joined parts: several only if all their words are in one part that has several."""
    if not any(len(texts) == 1 and _has_words(texts[0]) for texts in parts):
        for index, texts in enumerate(parts):
            if len(texts) > 1:
                others = ["".join(other) for other in (_single(parts[:index]), _single(parts[index + 1 :]))]
                return [f"{others[0]}{text}{others[1]}" for text in texts]
    return ["".join(_single(parts))]


def _single(parts: list[list[str]]) -> list[str]:
    return [texts[0] if len(texts) == 1 else "{}" for texts in parts]


@cache
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
