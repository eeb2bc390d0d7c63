"""Assemble infer.py: the file of a task with the imported parts inlined.

The parts are modules of smelt, so they are formatted, typed and tested like all others; the result is one
file that imports nothing of smelt.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

PARTS_FOLDER = Path(__file__).parent / "parts"
_PREFIX = "smelt.export.package.standalone.parts."
# `python infer.py` puts the folder of infer.py first on sys.path, which may contain any file
_SAFE_PATH = """\
import os
import sys

if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # no file next to this one is imported, whatever it is called"""


def assemble_script(main: str, replacements: Mapping[str, str]) -> str:
    """Return the text of infer.py.

    Args:
        main: the file in `parts` that is placed last, and whose docstring is used.
        replacements: part -> the part that replaces it.
    """
    imports: dict[str, set[str]] = {}
    bodies: dict[str, str] = {}
    doc = _collect(main, replacements, imports, bodies)
    head = "\n\n".join([f'"""{doc}"""', _SAFE_PATH, _import_lines(imports)])
    return "\n\n\n".join([head, *bodies.values()]) + "\n"


def _collect(
    name: str, replacements: Mapping[str, str], imports: dict[str, set[str]], bodies: dict[str, str]
) -> str:
    """Add to `bodies` the code of the part `name` and the parts that it imports; return its docstring.

    imports: module -> names that are imported from it, and "" for the module itself.
    """
    text = (PARTS_FOLDER / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    last = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PREFIX):
            part = str(node.module).removeprefix(_PREFIX)
            part = replacements.get(part, part)
            if part not in bodies:
                _collect(part, replacements, imports, bodies)
        elif isinstance(node, ast.ImportFrom):
            imports.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                whole = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                imports.setdefault(whole, set()).add("")
        else:
            continue
        last = node.end_lineno or last
    bodies[name] = "\n".join(text.splitlines()[last:]).strip("\n")
    return ast.get_docstring(tree, clean=False) or ""


def _import_lines(imports: Mapping[str, set[str]]) -> str:
    """Return the import lines: the standard library, then the others."""
    groups: tuple[list[str], ...] = ([], [])
    for module, names in sorted(imports.items()):
        top = module.split(".")[0].split()[0]
        if top == "__future__":
            continue  # only annotations need it
        group = groups[0 if top in sys.stdlib_module_names else 1]
        group += [f"import {module}"] if "" in names else []
        wanted = sorted(names - {""}, key=lambda name: (not name.isupper(), name))
        group += [f"from {module} import {', '.join(wanted)}"] if wanted else []
    ordered = (sorted(group, key=lambda line: line.startswith("from")) for group in groups)
    return "\n\n".join("\n".join(group) for group in ordered if group)
