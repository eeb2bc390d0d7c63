"""How Optuna samples the points of a space, and where it keeps a study."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import hide_password
from smelt.pipeline.search.parameters import Parameter
from smelt.pipeline.search.space import Sampler

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.log"
_IDENTITY, _GRID_QUEUED = "identity", "grid_queued"
_STARTUP_TRIALS = 10  # random trials before the sampler uses their results
_MAX_GRID = 100_000


def distribution_of(each: Parameter) -> Any:
    """Return a parameter as a distribution of Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if each.choices:
        return CategoricalDistribution(each.labels)
    if each.kind == "int":
        return IntDistribution(int(each.low), int(each.high), log=each.log, step=int(each.step or 1))
    return FloatDistribution(each.low, each.high, log=each.log, step=each.step)


def make_sampler(name: Sampler, seed: int) -> Any:
    """Return the sampler `name`; a grid's points are queued, so none is sampled."""
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
    if name == "nsga2":
        return samplers.NSGAIISampler(seed=seed, population_size=2 * _STARTUP_TRIALS)
    return samplers.RandomSampler(seed=seed)  # the points of a grid are queued


def grid_points(parameters: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
    """Yield every point of a grid, the last parameter fastest.

    Raises:
        InputError: a range has no step, or there are too many points.
    """
    axes: list[Sequence[Any]] = []
    for each in parameters:
        if each.choices:
            axes.append(each.labels)
        elif each.kind == "float" and each.step is None:
            raise InputError(
                f"{each.name}: a grid needs a step: {{low: {each.low:g}, high: {each.high:g}, step: ...}}, or"
                " choices.",
                code="grid-without-step",
                setting=each.name,
            )
        else:
            size = each.step or 1
            count = int((each.high - each.low) / size + 1e-9) + 1
            axes.append([min(each.low + at * size, each.high) for at in range(count)])
    points = math.prod(map(len, axes))
    if points > _MAX_GRID:
        raise InputError(
            f"the grid has {points:,} points. Use larger steps, or another sampler.", code="grid-too-large"
        )
    for values in itertools.product(*axes):
        yield dict(zip((each.name for each in parameters), values, strict=True))


def number_of_points(parameters: Sequence[Parameter]) -> float:
    """Return the number of points of a grid; infinity if a range has no step."""
    return math.prod(
        len(each.labels)
        if each.choices
        else math.inf
        if each.kind == "float" and each.step is None
        else int((each.high - each.low) / (each.step or 1) + 1e-9) + 1
        for each in parameters
    )


def open_storage(url: str | None, folder: Path) -> Any:
    """Return Optuna's storage at `url`: a database, or for None a journal file in `folder`.

    Raises:
        InputError: it cannot be reached.
        MissingDependencyError: the database's driver is not installed.
    """
    from optuna import storages

    _require_kept(url)
    if url is None:
        from optuna.storages.journal import JournalFileBackend

        return storages.JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
    try:
        return storages.RDBStorage(url)
    except ImportError as error:
        raise MissingDependencyError(
            f"{hide_password(url)}: the database needs a driver: {error}. For PostgreSQL:"
            " pip install 'smelt[postgresql]'.",
            code="not-installed",
        ) from error
    except Exception as error:  # every driver has errors of its own
        raise InputError(
            f"{hide_password(url)}: the storage cannot be opened: {_driver_text(error, url)}. Expected"
            " a URL such as sqlite:///study.db or postgresql+psycopg://user@host/database.",
            code="storage-unreachable",
        ) from error


def _require_kept(url: str | None) -> None:
    """Require that a study outlives its process.

    Raises:
        InputError: the database is in memory.
    """
    if url is not None and re.fullmatch(r"sqlite(\+\w+)?:(//)?(/?(:memory:)?)(\?.*)?", url):
        raise InputError(
            f"{url}: a database in memory ends with its process. Name a file: sqlite:///study.db.",
            code="storage-unreachable",
        )


def check_storage(url: str | None, folder: Path, name: str, identity: str) -> None:
    """Check that a study can be stored; create neither a file nor a study.

    A database server gets Optuna's empty tables.

    Raises:
        InputError: as `open_study`.
    """
    import optuna

    _require_kept(url)
    path = folder / STUDY_FILE if url is None else _sqlite_file(url)
    if path is not None and not path.exists():
        if url is not None and not path.parent.is_dir():
            raise InputError(
                f"{url}: no folder {path.parent}. Create it, or choose another storage.",
                code="storage-unreachable",
            )
        return
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(url, folder)
    if _is_known_study(storage, url, folder, name):
        study = optuna.load_study(storage=storage, study_name=name)
        found = study.user_attrs.get(_IDENTITY)
        if found != identity and (found is not None or study.get_trials(deepcopy=False)):
            raise _other_study(url, folder, name)


def _is_known_study(storage: Any, url: str | None, folder: Path, name: str) -> bool:
    """Return whether the storage has the study `name`; a folder holds one study, a database many.

    Raises:
        InputError: the folder has another study.
    """
    import optuna

    names = optuna.get_all_study_names(storage)
    if url is None and names and name not in names:
        raise _other_study(url, folder, names[0])
    return name in names


def _sqlite_file(url: str) -> Path | None:
    """Return the file of a database of SQLite; None for other databases."""
    found = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url)
    return Path(found[1]) if found and found[1] != ":memory:" else None


def _other_study(url: str | None, folder: Path, name: str) -> InputError:
    return InputError(
        f"{folder / STUDY_FILE if url is None else hide_password(url)}: has the study of another"
        f" recipe, space, goal or --limit named '{name}'. Choose another folder with --out, or another"
        " storage; or undo the change to go on with it.",
        code="other-study",
    )


def open_study(
    url: str | None,
    folder: Path,
    name: str,
    identity: str,
    maximize: Sequence[bool],
    pruner: Any,
    grid: Sequence[Parameter],
) -> optuna.Study:
    """Return the study `name`, created if it is new, with all points of `grid` queued.

    A process that was killed while it created the study is made up for: identity and points that are missing
    are added. The caller holds a lock.

    Raises:
        InputError: the storage cannot be opened, has a study of another search, or as `grid_points`.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(url, folder)
    points = [] if not grid else list(grid_points(grid))
    way = optuna.study.StudyDirection
    directions = [way.MAXIMIZE if each else way.MINIMIZE for each in maximize]
    if _is_known_study(storage, url, folder, name):
        study = optuna.load_study(storage=storage, study_name=name, pruner=pruner)
    else:
        study = optuna.create_study(storage=storage, study_name=name, directions=directions, pruner=pruner)
    found = study.user_attrs.get(_IDENTITY)
    if found is None and study.directions == directions and not study.get_trials(deepcopy=False):
        study.set_user_attr(_IDENTITY, identity)
    elif found != identity:
        raise _other_study(url, folder, name)
    if points and not study.user_attrs.get(_GRID_QUEUED):
        known = [each.params or each.system_attrs.get("fixed_params") for each in study.get_trials()]
        queued = {json.dumps(point, sort_keys=True) for point in known}
        for point in points:
            if json.dumps(point, sort_keys=True) not in queued:
                study.enqueue_trial(point)
        study.set_user_attr(_GRID_QUEUED, True)
    return study


def _driver_text(error: Exception, url: str) -> str:
    """Return the first line of a driver's error, without what may be a part of the password."""
    parts = re.split(r"[@:/?&=]", url.partition("://")[2])
    shown = hide_password(url)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    for part in parts:
        if part and part not in shown:
            text = text.replace(part, "***")
    return text
