"""Find the folder of the model that a recipe or a command names: local, on the hub, or an adapter of peft.

An adapter is merged with its base model when it is first read, into a folder of this user's cache
(`~/.cache/smelt/adapters`, in `$XDG_CACHE_HOME` where that is set), and again if a file of either changes.
From there on it is a model like any other.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, combined_error
from smelt.core.files import json_hash, path_exists, read_json_object, resolve_path
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.core.messages import Message, info
from smelt.core.system import require_package
from smelt.core.workspaces import workspace
from smelt.data.tasks import Task
from smelt.models.weight_files import has_weights
from smelt.pipeline.inspect.model_folder import check_model_folder
from smelt.pipeline.inspect.peft_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PeftAdapter,
    is_adapter,
    merge_adapter,
    merged_config,
    read_adapter,
)
from smelt.training.settings import PEFT_VERSION

_MERGE_VERSION = 2  # increased whenever the same adapter would be merged differently
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Files to download from the hub: no pickles, no weights of other frameworks, no code, and no checkpoints of a
# training, which repositories of adapters often have.
_HUB_FILES = ["*.json", "*.safetensors", "*.spm", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
_IGNORED_HUB_FILES = ["checkpoint-*/*"]


def local_path(model: str, base: Path) -> Path | None:
    """Return the path that `model` is, relative to `base`; None for a hub id."""
    path = resolve_path(base, model)
    return path if path.exists() or not _HUB_ID.fullmatch(model) or path.parent.is_dir() else None


def local_model_folder(model: str, base: Path) -> Path | None:
    """Return the folder of `model`, relative to `base`; None if it is to be downloaded.

    An adapter is merged with its base model; None if that is to be downloaded.

    Raises:
        InputError: an adapter cannot be read or merged.
    """
    path = local_path(model, base)
    if path is None or not _has_adapter(path):
        return path
    adapter = read_adapter(path)
    base_folder = _base_folder(adapter)
    return None if base_folder is None else _merge_once(adapter, base_folder)


def fetch_model(model: str, base: Path, task: Task) -> Path:
    """Return the folder of `model`; a hub id is downloaded (only safetensors and text files).

    Raises:
        InputError: the download failed, or the model is not supported.
    """
    folder = _fetch_folder(model, base)
    problems, _ = check_model_folder(folder, task)
    if problems:
        raise combined_error(problems)
    return folder


def _fetch_folder(model: str, base: Path) -> Path:
    """Return the unchecked folder of `model`; a hub id, and the base model of an adapter, are downloaded.

    An adapter may itself be a hub id.

    Raises:
        InputError: the download failed, or an adapter cannot be merged.
    """
    folder = local_model_folder(model, base)
    if folder is not None:
        return folder
    local = local_path(model, base)
    path = local or _download(model)
    if not _has_adapter(path):
        return path
    adapter = read_adapter(path)
    name = model if local is None else str(path)
    return _merge_once(adapter, _base_folder(adapter) or _fetch_base(_download, adapter, name))


def fetch_adapter(model: str, base: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder and the config of the adapter `model`, merged with its base model.

    The folder is None if the base model is on the hub and not in the local cache: of it only the config is
    downloaded.

    Raises:
        InputError: a download failed, or the adapter cannot be merged.
    """
    local = local_path(model, base)
    adapter = read_adapter(local or _download(model))
    base_folder = _base_folder(adapter)
    if base_folder is not None:
        folder = _merge_once(adapter, base_folder)
        return folder, read_json_object(folder / "config.json")
    name = model if local is None else str(local)
    return None, merged_config(adapter, _fetch_base(_download_config, adapter, name))


def fetch_config_folder(model: str, base: Path) -> Path:
    """Return a folder with the config of `model`, of which nothing else is downloaded.

    model: a hub id, or the folder of an adapter, which is returned. The config of an adapter is
    `adapter_config.json`.

    Raises:
        InputError: the download failed.
    """
    return local_path(model, base) or _download_config(model)


def _download_config(model: str, revision: str | None = None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    offline_reason = hub_unreachable_reason()
    try:
        with hub_cache_only(offline_reason):
            try:
                return Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision)).parent
            except EntryNotFoundError as error:
                try:
                    return Path(huggingface_hub.hf_hub_download(model, ADAPTER_CONFIG)).parent
                except EntryNotFoundError:
                    raise error from None  # a model needs config.json
    except Exception as error:  # the hub client raises many types; all mean that the download failed
        raise _hub_error(model, offline_reason, error, revision) from error


def merged_model_folder(path: Path) -> Path:
    """Return the folder of an adapter merged with its base model; any other `path` is returned unchanged.

    Raises:
        InputError: it cannot be read or merged, or its base model is not on this machine.
    """
    if not _has_adapter(path):
        return path
    folder = local_model_folder(str(path), path.parent)
    if folder is None:
        adapter = read_adapter(path)
        revision = f" --revision {adapter.revision}" if adapter.revision else ""
        text = (
            f"{path}: its base model {adapter.base} is not on this machine. Download it first:"
            f" hf download {adapter.base}{revision}."
        )
        raise InputError(text, code="not-in-hub-cache")
    return folder


def adapter_note(model: str, base: Path) -> Message | None:
    """Return a note about `model` if it is the folder of an adapter, which is merged; else None."""
    path = local_path(model, base)
    if path is None or not _has_adapter(path):
        return None
    adapter = read_adapter(path)
    folder = local_model_folder(model, base)
    end = "is downloaded by the run" if folder is None else f"is merged with it into {folder}"
    text = f"'{model}' is an adapter of peft ({adapter.variant}, rank {adapter.rank}); {adapter.base} {end}."
    return info("peft-adapter", text)


def _has_adapter(path: Path) -> bool:
    """Return whether `path` is an adapter's folder.

    Raises:
        InputError: it has a model too: smelt would read one of them, transformers the other.
    """
    if not path_exists(path):  # also a name that is too long
        return False
    if (path / ADAPTER_CONFIG).is_file() and has_weights(path):
        raise InputError(
            f"{path}: both a model and an adapter ({ADAPTER_CONFIG}). Move one of them to another folder.",
            code="model-and-adapter",
        )
    return is_adapter(path)


def _base_folder(adapter: PeftAdapter) -> Path | None:
    """Return the folder of an adapter's base model; None if it is on the hub and not in the local cache.

    As in peft, the path is relative to the current folder; else it may be relative to the adapter's.

    Raises:
        InputError: there is no such model.
    """
    for parent in (Path.cwd(), adapter.folder):
        path = resolve_path(parent, adapter.base)
        if path.exists() and path.resolve() != adapter.folder.resolve():
            return local_model_folder(str(path), parent)
    is_hub_id = _HUB_ID.fullmatch(adapter.base) and not Path(adapter.base).parent.is_dir()
    if not is_hub_id and ("/" in adapter.base or os.sep in adapter.base):
        raise InputError(
            f"{adapter.folder / ADAPTER_CONFIG}: base_model_name_or_path: no such folder: {adapter.base}. Set"
            " it to the folder or hub id of the model that the adapter was trained on.",
            code="missing-base-model",
        )
    return _cached_snapshot(adapter.base, adapter.revision)


def _snapshot(model: str, revision: str | None) -> Path:
    import huggingface_hub

    folder = huggingface_hub.snapshot_download(
        model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_IGNORED_HUB_FILES
    )
    return Path(folder)


def _cached_snapshot(model: str, revision: str | None) -> Path | None:
    try:
        with hub_cache_only("only the cache is read"):
            folder = _snapshot(model, revision)
    except Exception:  # the hub client raises many types; all mean that it is not there
        return None
    return folder if has_weights(folder) else None


def _download(model: str, revision: str | None = None) -> Path:
    offline_reason = hub_unreachable_reason()
    try:
        with hub_cache_only(offline_reason):
            folder = _snapshot(model, revision)
    except Exception as error:  # the hub client raises many types; all mean that the download failed
        raise _hub_error(model, offline_reason, error, revision) from error
    if offline_reason and not has_weights(folder) and not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(  # `smelt init` downloads only the config
            f"{model}: the local hub cache has no weights (safetensors) of it, only {folder};"
            f" {offline_reason}. Download the model with a network connection first.",
            code="not-in-hub-cache",
        )
    return folder


def _fetch_base(download: Callable[[str, str | None], Path], adapter: PeftAdapter, name: str) -> Path:
    """Return the folder of the base model of `adapter`, as `download` fetches it.

    name: the adapter's hub id, or its folder.
    """
    try:
        return download(adapter.base, adapter.revision)
    except InputError as error:
        text = f"{name}: an adapter, whose base model is missing: {error}"
        raise InputError(text, code=error.code, file=str(adapter.folder / ADAPTER_CONFIG)) from error


def _merge_once(adapter: PeftAdapter, base: Path) -> Path:
    """Return the folder of the merged model, made now if it is not in the cache.

    Raises:
        InputError: the base model or the adapter is not supported, or they do not fit each other.
    """
    require_package("peft", PEFT_VERSION, f"{adapter.folder}: an adapter of peft")
    problems, _ = check_model_folder(base, None)
    if problems:
        raise combined_error([problem.with_prefix(f"{adapter.folder}: base model: ") for problem in problems])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smelt" / "adapters"
    files = _file_stamps([*adapter.files, *(path for path in base.iterdir() if path.is_file())])
    folder = cache / json_hash([_MERGE_VERSION, version("peft"), files])
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with workspace(cache) as space:
            merge_adapter(adapter, base, space)
            with contextlib.suppress(OSError):  # another process was faster
                space.rename(folder)
    return folder


def _file_stamps(paths: Sequence[Path]) -> list[list[Any]]:
    """Return path, size and time of each file: hashes of large weights would take seconds in each plan."""
    stamps = ((path, path.stat()) for path in paths)
    return sorted([str(path.resolve()), stamp.st_size, stamp.st_mtime_ns] for path, stamp in stamps)


def _hub_error(
    model: str, offline_reason: str | None, error: Exception, revision: str | None = None
) -> InputError:
    """Return the error for a failed download. offline_reason: why the hub is not reachable, or None."""
    name = model if revision is None else f"{model} (revision {revision})"
    if offline_reason is None:
        return InputError(
            f"{name}: no such folder, and cannot download a model of this name from the hub: {error}",
            code="not-on-hub",
        )
    return InputError(
        f"{name}: no such folder, and not in the local hub cache; {offline_reason}."
        " Use a model's folder, or download the model with a network connection first.",
        code="not-in-hub-cache",
    )
