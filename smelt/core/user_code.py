"""Import modules of the user's own code, as they are now, from the folder that they are in.

Used for custom metrics and PyTorch modules, which a recipe names by their import path.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, SmeltError, did_you_mean
from smelt.core.files import json_hash, sha256_of, write_atomically


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Find modules of `folder` before all others, inside the context."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may change the path
            sys.path.remove(str(folder))


# Hash of the file of each module that was imported from a folder, with that folder.
_imported: dict[str, tuple[Path, str]] = {}


def import_current(name: str, folder: Path) -> Any:
    """Return the module as it is in its file now; what it prints goes to standard error.

    Modules of the folder are imported again if one of them was edited, or is loaded from another folder.
    """
    importlib.invalidate_caches()
    modules = folder_modules([name], folder)
    states = {module: (folder, sha256_of(file)) for module, file in modules.items()}
    outdated = {module for module, (previous_folder, _) in _imported.items() if previous_folder != folder}
    outdated |= {module for module, file in modules.items() if _is_loaded_elsewhere(module, file)}
    edited = any(_imported.get(module, state) != state for module, state in states.items())
    for module in [*sys.modules]:
        parents = {module[:end] for end in range(1, len(module)) if module[end] == "."}
        if outdated & {module, *parents} or (edited and module in modules):
            del sys.modules[module]
            _imported.pop(module, None)
    with redirect_stdout(sys.stderr):
        loaded = importlib.import_module(name)
    _imported.update(states)
    return loaded


def _is_loaded_elsewhere(module: str, file: Path) -> bool:
    """Return whether `module` is loaded, but not from `file`."""
    loaded = sys.modules.get(module)
    source = getattr(loaded, "__file__", None)
    return loaded is not None and (source is None or Path(source).resolve() != file.resolve())


def _is_in_use(module: str, file: Path) -> bool:
    """Return whether an import returns a module of this process instead of `file`: `random`, smelt itself."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package == __name__.partition(".")[0]:
        return True
    return module not in _imported and _is_loaded_elsewhere(module, file)


def folder_modules(names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Return the files in `folder` of modules and of all that they import, by the module's name.

    They are found in the source, so those that a function imports when it is called are included.
    """
    files: dict[str, Path] = {}
    pending = [*names]
    packages = {name.partition(".")[0] for name in pending}
    while pending:
        parts = pending.pop().split(".")
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            path = folder.absolute().joinpath(*parts[:count])
            candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
            file = next((candidate for candidate in candidates if candidate.is_file()), None)
            if file is None or module in files or parts[0] in sys.builtin_module_names:
                continue
            if parts[0] not in packages and _is_in_use(module, file):
                continue
            files[module] = file
            pending += _imported_names(file, module)
    return files


def _imported_names(file: Path, module: str) -> Iterator[str]:
    """Yield the names of what the module in `file` imports: modules, and what may be modules of packages."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return  # the import reports it
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*outer, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


UNTRUSTED_MODULE = "untrusted-module"
_RECORDED_CODE_FOLDER = "modules"


def user_code_files(functions: Iterable[str], folder: Path) -> dict[str, Path]:
    """Return the files in `folder` that functions are imported from, by their path relative to it.

    These are the modules of the functions, and all others of the folder that they import. Installed packages
    are found from everywhere.

    Args:
        functions: each `package.module:function`.
        folder: of the recipe.
    """
    modules = folder_modules([name.partition(":")[0] for name in functions], folder)
    return {file.relative_to(folder.absolute()).as_posix(): file for file in modules.values()}


def copy_user_code(functions: Iterable[str], folder: Path, target: Path) -> None:
    """Copy the files of `user_code_files` into `target`, so that a recipe there finds its functions."""
    for relative, file in user_code_files(functions, folder).items():
        copy = target / relative
        if copy.resolve() != file.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, file.read_bytes())


def record_source(function: str, folder: Path) -> str:
    """Copy the code of a function into this user's cache; return the hash of its name and code.

    Artifacts name code by this hash alone, and `recorded_source` reads it from the cache: code in a folder
    that was downloaded is never imported.

    Args:
        function: `package.module:function`; its module and those that it imports are copied.
        folder: with these modules.

    Raises:
        InputError: `module-not-found`: `folder` has no such module.
    """
    files = user_code_files([function], folder)
    if not files:
        module, names = function.partition(":")[0], [path.stem for path in folder.glob("*.py")]
        package = module.partition(".")[0]
        advice = "Put the function into a .py file there; it may import installed packages."
        with suppress(ImportError, ValueError):
            if importlib.util.find_spec(package) is not None:  # of a package alone, which imports nothing
                advice = (
                    f"'{package}' is an installed package. Write a function in a .py file there that calls"
                    f" '{function}'."
                )
        raise InputError(
            f"there is no module '{module}' in the folder '{folder.absolute()}'."
            f" {advice}{did_you_mean(module, names)}",
            code="module-not-found",
        )
    contents = {name: path.read_bytes() for name, path in files.items()}
    source_hash = _hash_of_source(function, contents)
    for name, content in contents.items():
        target = _recorded_folder(source_hash) / name
        if not target.is_file() or target.read_bytes() != content:
            write_atomically(target, content)
    return source_hash


def recorded_source(function: str, source_hash: str) -> Path:
    """Return the folder of the code of a function, which the user has named in a recipe on this machine.

    Raises:
        InputError: `untrusted-module`: there is no code with this hash.
    """
    folder = _recorded_folder(source_hash) if re.fullmatch(r"[0-9a-f]{64}", source_hash) else None
    files = sorted(folder.rglob("*.py")) if folder is not None and folder.is_dir() else []
    if folder is None or source_hash != _hash_of_source(
        function, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    ):
        raise InputError(
            f"the model is the PyTorch module '{function[:80]}', whose code has not been named in a recipe by"
            f" your user on this machine (hash {source_hash[:12]}). Code that comes with a model is never"
            " run. Run `smelt plan` with a recipe that names this code, model: {module: ...}, first.",
            code="untrusted-module",
        )
    return folder


@contextmanager
def user_code_errors(problem: str, error_class: type[SmeltError] = InputError) -> Iterator[None]:
    """Convert errors of the user's code inside the context to errors that name its file and line.

    Args:
        problem: the beginning of the message, such as "'nets:build' fails".
        error_class: of the error.

    Raises:
        SmeltError: `module-failed`: the code raised an error; the message names file and line. Errors of
            smelt are passed on.
    """
    try:
        yield
    except SmeltError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code does
        location = _line_in_recorded_code(error)
        location_text = f" in {location}" if location else ""
        text = f"{problem}{location_text}: {type(error).__name__}: {error}".rstrip(".")
        raise error_class(f"{text}.", code="module-failed") from error


def _line_in_recorded_code(error: BaseException) -> str | None:
    """Return the file, relative to its folder, and line of recorded code that `error` was raised in."""
    base = _recorded_folder("").absolute()
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(base):
            return f"{'/'.join(path.relative_to(base).parts[1:])}, line {line}"
    return None


def _hash_of_source(function: str, contents: Mapping[str, bytes]) -> str:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return json_hash({"function": function, "files": hashes})


def _recorded_folder(source_hash: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "modules" / source_hash
