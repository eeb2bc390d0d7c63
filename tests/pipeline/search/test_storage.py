"""The storage of a study: workers with folders of their own, servers that restart, damaged files."""

import contextlib
import os
import random
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
from sqlalchemy.exc import OperationalError

from smelt.core.errors import InputError, RunError, SmeltError
from smelt.core.locks import current_owner
from smelt.core.messages import message_codes
from smelt.pipeline.search import storage as storage_module
from smelt.pipeline.search.storage import STUDY_FILE, StudyStorage
from smelt.pipeline.search.study import Search
from tests.support.expected_errors import raises_code
from tests.support.processes.postgres_server import postgres_server
from tests.support.search_recipes import formula, search, size_space, study_url


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    return size_space(tmp_path_factory.mktemp("space"))


@pytest.fixture(autouse=True)
def formula_for_runs(monkeypatch):
    monkeypatch.setattr(Search, "_measure", lambda self, trial: formula(trial.params))


@pytest.fixture
def warned(monkeypatch):
    """The codes of the warnings of searches."""
    codes = []
    monkeypatch.setattr(Search, "_warn", lambda self, message: codes.append(message.code))
    return codes


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    with study_url(request.param, tmp_path) as url:
        yield url


def points(job):
    return [tuple(sorted(trial.parameters.items())) for trial in job.finished_trials()]


def test_workers_with_separate_folders_do_not_repeat_running_trial(space, tmp_path, monkeypatch, url):
    second, trial_numbers = [], []

    def measure(self, trial):
        trial_numbers.append(trial.number)
        if not second:  # while the first worker's first trial is running
            second.append(search(space, tmp_path / "two", trials=4, storage=url))
            assert second[0].run() == "trials"
        return formula(trial.params)

    monkeypatch.setattr(Search, "_measure", measure)
    first = search(space, tmp_path / "one", trials=4, storage=url)
    assert first.run() == "trials"
    assert trial_numbers == [0, 1, 2, 3]
    assert len(set(points(first))) == 4
    assert first.warnings() == []


def _elsewhere():
    """This process as one of another machine: whether it runs is not visible."""
    return replace(current_owner(), kernel="another", host="node2")


def _age_heartbeats(tmp_path):
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")
    database.close()


@pytest.mark.parametrize("stale", [False, True])
def test_trial_of_other_machine_is_repeated_only_without_heartbeat(space, tmp_path, monkeypatch, stale):
    url = f"sqlite:///{tmp_path}/study.db"
    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "current_owner", _elsewhere)
        patch.setattr("smelt.pipeline.search.trials._fail", lambda study, number: None)  # it is killed
        patch.setattr(Search, "_measure", lambda self, trial: (_ for _ in ()).throw(KeyboardInterrupt))
        assert search(space, tmp_path / "dead", trials=3, storage=url).run() == "interrupted"
    if stale:
        _age_heartbeats(tmp_path)
    job = search(space, tmp_path / "alive", trials=3, storage=url)
    job.run()
    states = [trial.state.name for trial in job.open_study().trials]
    assert states == (["FAIL", *3 * ["COMPLETE"]] if stale else ["RUNNING", *2 * ["COMPLETE"]])
    assert message_codes(job.warnings()) == (["worker-died"] if stale else [])
    if stale:
        assert "node2" in job.warnings()[0].message
        assert points(job)[0] == tuple(sorted(job.open_study().trials[0].params.items()))


def test_worker_continues_after_its_trial_was_taken_over(space, tmp_path, monkeypatch, warned):
    url, trial_numbers = f"sqlite:///{tmp_path}/study.db", []

    def measure(self, trial):
        trial_numbers.append(trial.number)
        if len(trial_numbers) == 1:  # suspended for a long time, while another worker asks for its trial
            _age_heartbeats(tmp_path)
            assert search(space, tmp_path / "two", trials=2, storage=url).run() == "trials"
        return formula(trial.params)

    monkeypatch.setattr(Search, "_measure", measure)
    job = search(space, tmp_path / "one", trials=3, storage=url)
    assert job.run() == "trials"
    assert warned == ["worker-died", "trial-taken-over"]
    assert [trial.state.name for trial in job.open_study().trials] == ["FAIL", *3 * ["COMPLETE"]]
    assert len(set(points(job))) == 3


def test_heartbeat_is_recorded_until_trial_ends(space, tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "HEARTBEAT_S", 0.01)
    database, recorded = f"sqlite:///{tmp_path}/study.db", []
    import optuna

    def record(self, trial_id):
        recorded.append(trial_id)
        if len(recorded) == 2:
            raise OSError  # an outage ends no heartbeat

    monkeypatch.setattr(optuna.storages.RDBStorage, "record_heartbeat", record)

    def measure(self, trial):
        while len(recorded) < 4:
            time.sleep(0.01)
        return formula(trial.params)

    monkeypatch.setattr(Search, "_measure", measure)
    search(space, tmp_path / "out", trials=1, storage=database).run()
    deadline = time.monotonic() + 60
    while [thread for thread in threading.enumerate() if thread.name == "smelt-trial-heartbeat"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_result_is_stored_after_server_restart(space, tmp_path, monkeypatch, warned):
    with postgres_server() as server:

        def measure(self, trial):
            server.stop()
            if trial.number:  # away for a moment
                threading.Timer(1, server.start).start()
            else:
                server.start()
            return formula(trial.params)

        monkeypatch.setattr(Search, "_measure", measure)
        job = search(space, tmp_path / "out", trials=2, storage=server.url)
        assert job.run() == "trials"
        assert len(points(job)) == 2
        assert warned == ["storage-unreachable"]

        with job.storage.lock("ask"):
            server.stop()
            server.start()
        with job.storage.lock("ask"):  # released by the restart
            pass
        monkeypatch.setattr(storage_module, "MAX_OUTAGE_S", 0.0)
        server.stop()
        with raises_code("storage-unreachable", RunError):
            job.finished_trials()
        with raises_code("storage-unreachable", InputError):
            search(space, tmp_path / "out", storage=server.url).check()
        server.start()


def test_storage_outage_while_claiming_trial_loses_no_point(space, tmp_path, monkeypatch, warned):
    claim, claimed_params = StudyStorage.claim, []

    def fail_first(self, study, trial, stack):
        claimed_params.append(trial.params)
        if len(claimed_params) == 1:
            busy = sqlite3.OperationalError("database is locked")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("UPDATE trials", None, busy)
        claim(self, study, trial, stack)

    monkeypatch.setattr(StudyStorage, "claim", fail_first)
    job = search(space, tmp_path, trials=1, storage=f"sqlite:///{tmp_path}/study.db")
    assert job.run() == "trials"
    assert warned == ["storage-unreachable"]
    assert claimed_params[1] == claimed_params[0] == dict(points(job)[0])
    assert [trial.state.name for trial in job.open_study().trials] == ["FAIL", "COMPLETE"]


def _goes_on_or_is_an_error(space, folder, **options):
    """Continue a search; return the code of its error, None without one."""
    job, code = search(space, folder, trials=5, **options), None
    try:
        job.check()
        job.run()
        job.front()
    except SmeltError as error:
        code = error.code
    assert code in (None, "damaged-study", "other-study", "storage-unreachable")
    return code


def test_changed_database_is_error_or_harmless(space, tmp_path):
    path, draw, codes = tmp_path / "study.db", random.Random(0), set()
    url = f"sqlite:///{path}"
    search(space, tmp_path / "out", trials=3, storage=url).run()
    content = path.read_bytes()
    with sqlite3.connect(path) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [
            (table, row[1]) for table in tables for row in database.execute(f"PRAGMA table_info({table})")
        ]
    database.close()
    statements = [f"UPDATE OR IGNORE {t} SET {c} = {draw.choice((-1, 7, chr(39) * 2))}" for t, c in columns]
    statements += [f"DROP TABLE {table}" for table in tables] + [f"DELETE FROM {table}" for table in tables]
    for statement in draw.sample(statements, 8):
        path.write_bytes(content)
        with contextlib.suppress(sqlite3.IntegrityError), sqlite3.connect(path) as database:
            database.execute(statement)
        database.close()
        codes.add(_goes_on_or_is_an_error(space, tmp_path / "out", storage=url))
    for size in (10, len(content) // 2):  # the rest is lost
        path.write_bytes(content[:size])
        codes.add(_goes_on_or_is_an_error(space, tmp_path / "out", storage=url))
    assert codes >= {"damaged-study", "storage-unreachable"}


@pytest.mark.parametrize("part", ["result", "parameter", "constraint"])
def test_changed_trial_is_rejected_by_its_hash(space, tmp_path, part):
    """A changed value would otherwise be reported as measured."""
    job = search(space, tmp_path, trials=2)
    job.run()
    size = job.finished_trials()[0].result.values["size"]
    queries = {
        "result": "UPDATE trial_user_attributes SET value_json"
        f""" = replace(value_json, '"size": {size}', '"size": 1.5') WHERE key = 'result'""",
        "parameter": "UPDATE trial_params SET param_value = 0.625 WHERE param_name = 'prune.keep_ratio'",
        "constraint": "UPDATE trial_system_attributes SET value_json = '-1.0' WHERE key LIKE 'constraint%'",
    }[part]
    with sqlite3.connect(tmp_path / STUDY_FILE) as database:
        assert database.execute(queries).rowcount > 0
    database.close()
    for attempt in (Search.check, Search.run):
        with raises_code("damaged-study", InputError):
            attempt(search(space, tmp_path, trials=2))


def test_braces_in_search_path_are_kept_and_question_mark_is_rejected(space, tmp_path):
    """Optuna fills templates in URLs, and a question mark ends the path of a URL."""
    folder = tmp_path / "{SCHEMA_VERSION} 100%{}"
    search(space, folder, trials=1).run()
    assert (folder / STUDY_FILE).is_file()
    with raises_code("unusable-folder", InputError):
        search(space, tmp_path / "why?", trials=1).run()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_storage_in_read_only_folder_is_rejected(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    storage = StudyStorage(f"sqlite:///{folder}/study.db", tmp_path, "study", print)
    folder.chmod(0o500)
    with raises_code("unusable-folder", InputError), storage.lock("open"):
        pass
