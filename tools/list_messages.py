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
MAX_DEPTH = 8  # of variables and functions that contain a text
PASSING_FUNCTIONS = (
    "str",
    "list",
    "tuple",
    "sorted",
    "fromkeys",
)  # their result has the texts of their argument
OVERRIDDEN = ("poor_order", "unsupported_config")  # functions of several stages or families
COLLECTORS = ("add", "say")  # of `smelt.pipeline.recipe.validation_errors.RecipeErrors`


class ListedMessage(NamedTuple):
    """A message in the source: location, kind, code (None if it has none) and text."""

    location: str
    kind: str
    code: str | None
    text: str


def messages_in(path: Path) -> Iterator[ListedMessage]:
    """Yield the warnings and errors in a file, each with every text that it may have."""
    texts = _Texts.of_file(path)
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
                # a recipe's errors are shown with a full stop
                shown = f"{sentence.rstrip('.')}." if kind == "SettingError" else sentence
                yield ListedMessage(location, kind, code_text, shown)


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
    """What names stand for, each expression with the texts of its module."""

    constants: dict[str, _Value]
    functions: dict[str, list[_Value]]
    """What each function returns or yields."""
    fields: dict[str, list[_Value]]
    """What each keyword argument is given."""


class _Value(NamedTuple):
    module: _Texts
    node: ast.expr

    def texts(self, depth: int) -> list[str]:
        return self.module.of(self.node, depth)


@cache
def _project() -> _Definitions:
    """Return the definitions of all modules; of functions those whose name is unique."""
    modules = [_Texts.of_file(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    counts = Counter(name for module in modules for name in module.defined.functions)
    functions: dict[str, list[_Value]] = defaultdict(list)
    fields: dict[str, list[_Value]] = defaultdict(list)
    for module in modules:
        for name, values in module.defined.functions.items():
            if counts[name] == 1 or name in OVERRIDDEN:
                functions[name] += values
        for name, values in module.defined.fields.items():
            fields[name] += values
    constants = {name: value for module in modules for name, value in module.defined.constants.items()}
    return _Definitions(constants, functions, fields)


class _Texts:
    """The texts of expressions in a file, with `{}` for values; a name has the last text assigned to it."""

    def __init__(self, path: Path) -> None:
        self.defined = _Definitions({}, defaultdict(list), defaultdict(list))
        self._functions = [node.lineno for node in _nodes(path) if isinstance(node, ast.FunctionDef)]
        self._assigned: dict[str, list[tuple[int, ast.expr]]] = defaultdict(list)
        self._added: dict[str, list[tuple[int, ast.expr]]] = defaultdict(list)
        for node in ast.iter_child_nodes(_nodes(path)[0]):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.defined.constants[node.targets[0].id] = _Value(self, node.value)
        for node in _nodes(path):
            self._record(node)

    @staticmethod
    @cache
    def of_file(path: Path) -> _Texts:
        return _Texts(path)

    def _record(self, node: ast.AST) -> None:
        """Record what a statement or expression binds."""
        match node:
            case ast.FunctionDef(name):
                self.defined.functions[name] += [
                    _Value(self, each.value)
                    for each in ast.walk(node)
                    if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) and each.value is not None
                ]
            case ast.keyword(str(name), value):
                self.defined.fields[name].append(_Value(self, value))
            case ast.Assign([ast.Name(name), *_], value):
                self._assigned[name].append((node.lineno, value))
            case ast.NamedExpr(ast.Name(name), value):
                self._assigned[name].append((node.lineno - 1, value))
            case ast.For(target, value) | ast.comprehension(target, value):
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        self._assigned[part.id].append((part.lineno - 2, value))
            case ast.AugAssign(ast.Name(name), ast.Add(), value):
                self._added[name].append((node.lineno, value))
            case ast.Call(ast.Attribute(ast.Name(name), "append"), [value]):
                self._added[name].append((node.lineno, value))

    def of(self, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the texts that an expression may have."""
        match node:
            case ast.Constant(str(value)) if value:
                return [value]
            case ast.JoinedStr(values):
                return _joined([self.of(value, depth + 1) for value in values])
            case ast.BinOp(left, ast.Add(), right):
                return _joined([self.of(left, depth), self.of(right, depth)])
            case ast.FormattedValue(value):
                return self.of(value, depth)
        if depth > MAX_DEPTH:
            return ["{}"]
        texts = [text for value in self._sources_of(node, depth) for text in value.texts(depth + 1)]
        return list(dict.fromkeys(filter(_has_words, texts))) or ["{}"]

    def _sources_of(self, node: ast.expr, depth: int) -> list[_Value]:
        """Return the expressions that an expression may have the value of."""
        match node:
            case ast.IfExp(body=first, orelse=second):
                nodes = [first, second]
            case ast.BoolOp(values=nodes) if depth == 0:
                pass
            case ast.List(nodes):
                pass
            case ast.ListComp(element) | ast.GeneratorExp(element) | ast.DictComp(value=element):
                nodes = [element]
            case ast.Call(func, [value, *_]) if _name(func) in PASSING_FUNCTIONS:
                nodes = [value]
            case ast.Call(ast.Attribute(value, "items")):
                nodes = [value]
            case ast.Name():
                return self._values_of(node)
            case ast.Call(func):
                name = _name(func)
                return self.defined.functions.get(name) or _project().functions.get(name, [])
            case ast.Attribute(attr=name) if depth == 0:
                return _project().fields.get(name, [])
            case _:
                return []
        return [_Value(self, each) for each in nodes]

    def _values_of(self, name: ast.Name) -> list[_Value]:
        """Return what was last assigned and added to a name, or the constant of this name."""
        start = max((line for line in self._functions if line < name.lineno), default=0)
        before = [entry for entry in self._assigned[name.id] if start < entry[0] < name.lineno]
        if before:
            assigned = max(before, key=lambda entry: entry[0])
            added = [entry for entry in self._added[name.id] if assigned[0] <= entry[0] < name.lineno]
            return [_Value(self, node) for _, node in (assigned, *added)]
        value = self.defined.constants.get(name.id) or _project().constants.get(name.id)
        return [] if value is None else [value]


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
