"""Where a study is stored: a database of SQLite in the search's folder, or one that workers share by URL.

A running trial has its worker as an attribute, and the worker records Optuna's heartbeat. A dead worker on
this machine is detected at once, one on another machine after `GRACE_S` without a heartbeat.

A server that cannot be reached for a while is waited for. What a database returns is checked: one that
something else has changed is an error that names it.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smelt.core.errors import InputError, MissingDependencyError, RunError, SmeltError
from smelt.core.files import json_hash
from smelt.core.locks import LockOwner, current_owner, file_lock
from smelt.core.messages import Message, hide_password, warning
from smelt.pipeline.search.parameters import Parameter
from smelt.pipeline.search.space import grid_points

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.db"
HEARTBEAT_S, GRACE_S = 60, 600
"""Seconds between two heartbeats, and without one until a worker of another machine counts as dead."""
MAX_OUTAGE_S = 300.0
"""Seconds that a server is waited for; its workers must not count as dead when it is back."""
_MAX_PAUSE_S = 10.0  # between two attempts
_SQLITE_TIMEOUT_S = 60.0  # for the writes of other workers
_SQLITE_BUSY, _SQLITE_ERROR = {5, 6}, 1  # primary result codes: another worker writes; a wrong statement
_IDENTITY, _GRID_QUEUED, _OWNER, _LOST = "identity", "grid_queued", "owner", "lost"
_Value = TypeVar("_Value")


class StudyStorage:
    """The storage of a study.

    Args:
        url: of a database; None for one in `folder`.
        folder: the search's folder.
        study_name: name of the study; a folder holds one study, a database many.
        warn: called with a warning about lost trials, or a server that does not answer.
    """

    def __init__(
        self, url: str | None, folder: Path, study_name: str, warn: Callable[[Message], None]
    ) -> None:
        self.folder, self.study_name, self.warn = folder, study_name, warn
        self.is_shared = url is not None  # by studies of other searches
        self.url = f"sqlite:///{folder / STUDY_FILE}" if url is None else url
        self.label = hide_password(self.url) if self.is_shared else str(folder / STUDY_FILE)
        self._database: Any = None  # once it is open

    def check(self, identity: str, validate: Callable[[optuna.Study], None]) -> None:
        """Check that a study can be stored; create neither a file nor a study.

        A database server gets Optuna's empty tables.

        Raises:
            InputError: as `open_study`.
        """
        import optuna

        self._require_file()
        path = self._file()
        if path is not None and not path.exists():
            if self.is_shared and not path.parent.is_dir():
                raise InputError(
                    f"{self.url}: no folder {path.parent}. Create it, or choose another storage.",
                    code="storage-unreachable",
                )
            return

        def check_once() -> None:
            with self.lock("open"):
                storage = self._open()
                if self._has_study(storage):
                    study = optuna.load_study(storage=storage, study_name=self.study_name)
                    stored_identity = study.user_attrs.get(_IDENTITY)
                    if stored_identity != identity and (
                        stored_identity is not None or study.get_trials(deepcopy=False)
                    ):
                        raise self._other_study(self.study_name)
                    validate(study)

        self.retry(check_once)

    def open_study(
        self,
        identity: str,
        maximize: Sequence[bool],
        pruner: Any,
        grid: Sequence[Parameter],
        validate: Callable[[optuna.Study], None],
    ) -> optuna.Study:
        """Return the study, created if it is new, with all points of `grid` queued.

        A process that was killed while it created the study is made up for: identity and points that are
        missing are added.

        Args:
            identity: hash of the search; another one has another study.
            maximize: for each objective, whether it is maximized.
            pruner: Optuna's pruner of the study.
            grid: the parameters of a grid; empty for other samplers.
            validate: called with the study; any exception means that it is damaged.

        Raises:
            InputError: the storage cannot be opened, is damaged or has a study of another search, or as
                `grid_points`.
            RunError: a server that was reached before has not answered for `MAX_OUTAGE_S`.
        """
        points = list(grid_points(grid)) if grid else []

        def open_once() -> optuna.Study:
            with self.lock("open"):
                return self._open_study(identity, maximize, pruner, points, validate)

        return self.retry(open_once)

    def _open_study(
        self,
        identity: str,
        maximize: Sequence[bool],
        pruner: Any,
        points: Sequence[dict[str, Any]],
        validate: Callable[[optuna.Study], None],
    ) -> optuna.Study:
        import optuna

        storage = self._open()
        directions = [
            optuna.study.StudyDirection.MAXIMIZE if is_maximized else optuna.study.StudyDirection.MINIMIZE
            for is_maximized in maximize
        ]
        if self._has_study(storage):
            study = optuna.load_study(storage=storage, study_name=self.study_name, pruner=pruner)
        else:
            study = optuna.create_study(
                storage=storage, study_name=self.study_name, directions=directions, pruner=pruner
            )
        stored_identity = study.user_attrs.get(_IDENTITY)
        if (
            stored_identity is None
            and study.directions == directions
            and not study.get_trials(deepcopy=False)
        ):
            study.set_user_attr(_IDENTITY, identity)
        elif stored_identity != identity:
            raise self._other_study(self.study_name)
        if study.directions != directions:
            raise ValueError("the goals are not those that were stored")  # the identity has them
        validate(study)
        if points and not study.user_attrs.get(_GRID_QUEUED):
            queued = {json_hash(point_of(trial)) for trial in study.get_trials(deepcopy=False)}
            for point in points:
                if json_hash(point) not in queued:
                    study.enqueue_trial(point)
            study.set_user_attr(_GRID_QUEUED, True)
        return study

    def _open(self) -> Any:
        """Return Optuna's storage.

        Raises:
            InputError: it cannot be opened.
            MissingDependencyError: the database's driver is not installed.
        """
        import optuna
        from optuna.exceptions import ExperimentalWarning

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._require_file()
        if self._database is not None:
            return self._database
        arguments: dict[str, Any] = {"pool_pre_ping": True}  # a server may have restarted since the last use
        if self.url.startswith("sqlite"):
            arguments["connect_args"] = {"timeout": _SQLITE_TIMEOUT_S}
        with self._connecting(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # the heartbeat
            self._database = optuna.storages.RDBStorage(
                self.url.replace("{", "{{").replace("}", "}}"),  # a template of Optuna
                engine_kwargs=arguments,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=self._warn_of_stale,
            )
        return self._database

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Turn the errors of a first connection into one that names the URL; later ones are outages.

        Raises:
            InputError: the database cannot be opened.
            MissingDependencyError: its driver is not installed.
        """
        try:
            yield
        except ImportError as error:
            raise MissingDependencyError(
                f"{self.label}: the database needs a driver: {error}. For PostgreSQL:"
                " pip install 'smelt[postgresql]'.",
                code="not-installed",
            ) from error
        except Exception as error:  # every driver has errors of its own
            if self._database is not None and _is_outage(error):
                raise
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> InputError:
        return InputError(
            f"{self.label}: the storage cannot be opened: {_driver_text(error, self.url)}. Expected"
            " a URL such as sqlite:///study.db or postgresql+psycopg://user@host/database.",
            code="storage-unreachable",
        )

    def _require_file(self) -> None:
        """Require that a study is in a file.

        Raises:
            InputError: the database is in memory, or the folder's name ends the URL.
        """
        if not self.is_shared and "?" in self.url:
            raise InputError(
                f"{self.folder}: the folder of a search cannot have ? in its path. Choose another --out.",
                code="unusable-folder",
            )
        if re.fullmatch(r"sqlite(\+\w+)?:(//)?(/?(:memory:)?)(\?.*)?", self.url):
            raise InputError(
                f"{self.url}: a database in memory ends with its process. Name a file: sqlite:///study.db.",
                code="storage-unreachable",
            )

    def _file(self) -> Path | None:
        """Return the file of a database of SQLite; None for other databases."""
        match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", self.url)
        return Path(match[1]) if match and match[1] != ":memory:" else None

    def _has_study(self, storage: Any) -> bool:
        """Return whether the storage has the study.

        Raises:
            InputError: the folder has another study.
        """
        import optuna

        names = optuna.get_all_study_names(storage)
        if not self.is_shared and names and self.study_name not in names:
            raise self._other_study(names[0])
        return self.study_name in names

    def _other_study(self, name: str) -> InputError:
        return InputError(
            f"{self.label}: has the study of another recipe, space, goal or --limit named '{name}'. Choose"
            " another folder with --out, or another storage; or undo the change to go on with it.",
            code="other-study",
        )

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a lock of all workers of the study: in the folder, next to SQLite's file, or in PostgreSQL."""
        if self.url.startswith("postgresql"):
            with self._advisory_lock(name):
                yield
            return
        file = self._file() or self.folder / STUDY_FILE
        path = file.with_name(f"{file.name}.{name}.lock")
        with ExitStack() as stack:
            if path.parent.is_dir():  # else opening the storage raises
                try:
                    stack.enter_context(file_lock(path))
                except OSError as error:
                    raise InputError(
                        f"{path.parent}: cannot create a lock file here: {error.strerror}. Choose another"
                        " folder with --out, or another storage.",
                        code="unusable-folder",
                    ) from error
            yield

    @contextmanager
    def _advisory_lock(self, name: str) -> Iterator[None]:
        """Hold a lock in PostgreSQL, which ends with its connection.

        Source: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS
        """
        from sqlalchemy import NullPool, create_engine
        from sqlalchemy.exc import SQLAlchemyError

        key = int(json_hash([self.study_name, name])[:15], 16)
        with self._connecting():
            connection = create_engine(self.url, poolclass=NullPool).connect()
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({key})")
        try:
            yield
        finally:
            with suppress(SQLAlchemyError):  # a server that has restarted has released it
                connection.commit()
            connection.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what a changed database leads to in Optuna into an error that names it.

        Raises:
            InputError: any exception but an outage, a full disk and the like.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            yield
        except (SmeltError, UpdateFinishedTrialError, OSError, MemoryError):
            raise
        except Exception as error:
            if _is_outage(error):
                raise
            cause = _database_error(error)
            if cause is not None and getattr(cause.orig, "sqlite_errorcode", _SQLITE_ERROR) != _SQLITE_ERROR:
                raise self._unreachable(cause) from error
            text = _driver_text(_database_error(error) or error, self.url)
            raise InputError(
                f"{self.label}: the study is damaged: {type(error).__name__}: {text}. Restore the"
                " database from a copy, or search again in another folder (--out) or storage; finished steps"
                " are in the store.",
                code="damaged-study",
            ) from error

    def retry(self, work: Callable[[], _Value], patience_s: float | None = None) -> _Value:
        """Return the result of `work`, which can be repeated; wait for a server that cannot be reached.

        Args:
            work: uses the storage.
            patience_s: seconds that the server is waited for (default: `MAX_OUTAGE_S`).

        Raises:
            RunError: the server has not answered for that time.
            InputError: the study is damaged.
        """
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        patience_s = MAX_OUTAGE_S if patience_s is None else patience_s
        deadline, pause, warned = time.monotonic() + patience_s, 0.5, False
        while True:
            try:
                with self._reading():
                    return work()
            except (StorageInternalError, SQLAlchemyError) as error:  # an outage, else it were an InputError
                reason = _driver_text(_database_error(error) or error, self.url)
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"{self.label}: the storage has not answered for {patience_s:.0f} s: {reason}. The"
                        " same command continues the search.",
                        code="storage-unreachable",
                    ) from error
            if not warned:
                self.warn(
                    warning(
                        "storage-unreachable",
                        f"{self.label}: the storage does not answer: {reason}. Trying again for"
                        f" {patience_s:.0f} s.",
                    )
                )
            warned = True
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _MAX_PAUSE_S)

    def claim(self, study: optuna.Study, trial: optuna.Trial, stack: ExitStack) -> None:
        """Show that this process runs the trial, until `stack` is closed. The caller holds `lock`."""
        stack.enter_context(self._heartbeat(trial.number))
        # last: a trial without it is one whose worker died before
        trial.set_user_attr(_OWNER, asdict(current_owner()))

    @contextmanager
    def _heartbeat(self, number: int) -> Iterator[None]:
        """Record Optuna's heartbeat of a running trial in the database.

        Optuna records it for `Study.optimize` only, in a thread that an outage ends.
        """
        database, stop_event = self._database, threading.Event()
        study_id = database.get_study_id_from_name(self.study_name)
        trial_id = database.get_trial_id_from_study_id_trial_number(study_id, number)
        database.record_heartbeat(trial_id)

        def record() -> None:
            while not stop_event.wait(HEARTBEAT_S):
                with suppress(Exception):  # an outage; the next one may be recorded
                    database.record_heartbeat(trial_id)

        thread = threading.Thread(target=record, name="smelt-trial-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()

    def dead_workers(self, trials: Iterable[optuna.trial.FrozenTrial]) -> dict[int, str]:
        """Return the workers of those running `trials` that have certainly ended, by the trial's number.

        "": the trial was only being asked for, and nothing is lost. The caller holds the lock of `ask`.
        """
        workers = {trial.number: trial_owner(trial) for trial in trials}
        return {
            number: str(owner or "")
            for number, owner in workers.items()
            if owner is None or owner.is_alive() is False
        }

    def fail_stale_trials(self, study: optuna.Study) -> None:
        """End the running trials without a heartbeat for `GRACE_S`."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)

    def _warn_of_stale(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        self.record_loss(study, trial.number, str(trial_owner(trial) or "a process"))

    def record_loss(self, study: optuna.Study, number: int, owner: str) -> None:
        """Record that a dead worker has lost a trial, and warn."""
        study.set_user_attr(_LOST, study.user_attrs.get(_LOST, {}) | {str(number): owner})
        self.warn(_lost_warning(number, owner))


def lost_trials(study: optuna.Study) -> list[Message]:
    """Return a warning for each trial that a dead worker has lost."""
    return [_lost_warning(int(number), owner) for number, owner in study.user_attrs.get(_LOST, {}).items()]


def _lost_warning(number: int, owner: str) -> Message:
    return warning(
        "worker-died",
        f"Trial {number} was running in {owner}, which has ended without a result. The same point is queued"
        " again. If this repeats, look for out of memory in the system's log.",
    )


def trial_owner(trial: optuna.trial.FrozenTrial) -> LockOwner | None:
    """Return the process that runs or ran a trial; None if it died before it was recorded."""
    owner = trial.user_attrs.get(_OWNER)
    return None if owner is None else LockOwner(**owner)


def point_of(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial, of a queued one those that it will have."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


def _database_error(error: Exception) -> Any:
    """Return the database's error in an error of Optuna; None if there is none."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    return cause if isinstance(cause, DBAPIError) else None


def _is_outage(error: Exception) -> bool:
    """Return whether a database cannot be reached at the moment: another attempt may succeed."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    cause = _database_error(error)
    if cause is None:
        return False
    sqlite_code = getattr(cause.orig, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return (sqlite_code & 0xFF) in _SQLITE_BUSY
    return cause.connection_invalidated or isinstance(cause, OperationalError | InterfaceError)


def _driver_text(error: Exception, url: str) -> str:
    """Return the first line of a driver's error, without what may be a part of the password."""
    url_parts = re.split(r"[@:/?&=]", url.partition("://")[2])
    redacted_url = hide_password(url)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    for part in url_parts:
        if part and part not in redacted_url:
            text = text.replace(part, "***")
    return text.rstrip(".")
