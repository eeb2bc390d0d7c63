"""Stores of several machines behind one URL: memory, a folder, and a real S3 server."""

import hashlib
import json
import threading
import uuid

import fsspec
import pytest

from smelt.core import remote_store
from smelt.core.artifact import Manifest
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import message_codes
from smelt.core.remote_store import RemoteStore, is_store_url, open_remote_store
from smelt.core.store import CHECKPOINT_FILE, StepCheckpoints, Store
from tests.support.expected_errors import raises_code
from tests.support.processes.s3_server import s3_server

KEY = "ab" * 32


@pytest.fixture(scope="module", params=["memory", "file", "s3"])
def server(request, tmp_path_factory):
    if request.param == "s3":
        with s3_server("models") as url:
            yield url
    else:
        yield {"memory": "memory://", "file": f"file://{tmp_path_factory.mktemp('bucket')}"}[request.param]


class Machines:
    """Machines with a store of their own and one remote store."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.fs, self.root = fsspec.core.url_to_fs(url)

    def store(self, name):
        """The store of a machine, with connection and memory of its own; its warnings in `found`."""
        remote = RemoteStore(self.url)
        remote.check()
        messages = []
        store = Store(self.folder / name, remote, messages.append)
        store.messages = messages
        return store


@pytest.fixture
def machines(server, tmp_path):
    return Machines(f"{server}/{uuid.uuid4().hex}", tmp_path)


def _commit(store, text="hello", replace=False):
    manifest = Manifest(
        key=KEY, format="torch", task="translation", stage="x", settings={}, seed=0, parent=None, versions={}
    )
    with store.workspace() as space:
        out = space / "out"
        (out / "deep").mkdir(parents=True)
        (out / "model.safetensors").write_text(text)
        (out / "deep" / "b.json").write_text("b")
        return store.commit(out, manifest, replace)


def _text(artifact):
    return (artifact.path / "model.safetensors").read_text()


def test_artifacts_and_scores_are_copied_between_machines(machines):
    first, two = machines.store("one"), machines.store("two")
    assert (two.find(KEY), two.read_score("s")) == (None, None)
    artifact = _commit(first)
    first.write_score("s", {"bleu": 1.5})
    copied = two.find(KEY)
    assert (copied.manifest, copied.path) == (artifact.manifest, two.root / "artifacts" / KEY)
    copied.verify()
    assert two.read_score("s") == {"bleu": 1.5}
    assert (two.root / "scores" / "s.json").is_file()
    hashes = {hashlib.sha256(content).hexdigest() for content in (b"hello", b"b")}
    assert {name.rpartition("/")[2] for name in machines.fs.find(f"{machines.root}/files")} == hashes
    _commit(first, "changed", replace=True)  # --rebuild
    assert _text(machines.store("three").find(KEY)) == "changed"
    assert first.messages == two.messages == []


def test_two_writers_of_one_key_are_harmless(machines, monkeypatch):
    first, two = machines.store("one"), machines.store("two")
    write = first.remote._write

    def between(key, file):
        if key.startswith("artifacts/"):  # the other writer ends before the manifest of this one
            _commit(two, "second")
        write(key, file)

    monkeypatch.setattr(first.remote, "_write", between)
    _commit(first, "first")
    artifact = machines.store("three").find(KEY)
    artifact.verify()
    assert _text(artifact) == "first"
    assert [_text(store.find(KEY)) for store in (first, two)] == ["first", "second"]


@pytest.mark.parametrize("failing_key", ["files/", "artifacts/"])
def test_interrupted_push_is_absent_and_repeated(machines, monkeypatch, failing_key):
    first, two = machines.store("one"), machines.store("two")
    write = first.remote._write

    def broken(key, file):
        if key.startswith(failing_key):
            raise OSError("connection lost")
        write(key, file)

    with monkeypatch.context() as patch:
        patch.setattr(first.remote, "_write", broken)
        artifact = _commit(first)
    assert (message_codes(first.messages), _text(artifact)) == (["push-failed"], "hello")
    assert (two.find(KEY), two.messages) == (None, [])
    assert first.find(KEY) == artifact  # the next run in this store
    assert _text(two.find(KEY)) == "hello"


@pytest.mark.parametrize("damage", ["bytes", "missing", "manifest"])
def test_damaged_remote_files_are_absent_and_written_again(machines, damage):
    first, two = machines.store("one"), machines.store("two")
    _commit(first)
    url = f"{machines.root}/files/{hashlib.sha256(b'hello').hexdigest()}"
    if damage == "bytes":
        machines.fs.pipe_file(url, b"hellO")
    elif damage == "missing":
        machines.fs.rm_file(url)
    else:
        machines.fs.pipe_file(f"{machines.root}/artifacts/{KEY}.json", b'{"key"')
    assert two.find(KEY) is None
    assert message_codes(two.messages) == ["damaged-remote-file"]
    assert not (two.root / "artifacts" / KEY).exists()
    _commit(two)
    three = machines.store("three")
    assert (_text(three.find(KEY)), three.messages) == ("hello", [])


@pytest.mark.parametrize("name", ["../../x.json", "run.py"])
def test_remote_manifest_with_unknown_files_is_rejected(machines, name):
    first = machines.store("one")
    _commit(first)
    manifest = json.loads((first.root / "artifacts" / KEY / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["deep/b.json"]
    machines.fs.pipe_file(f"{machines.root}/artifacts/{KEY}.json", json.dumps(manifest).encode())
    two = machines.store("two")
    assert (two.find(KEY), message_codes(two.messages)) == (None, ["damaged-remote-file"])


def test_failing_remote_store_is_retried_after_pause(tmp_path, monkeypatch):
    machines = Machines(f"memory://{uuid.uuid4().hex}", tmp_path)
    first, requests, now = machines.store("one"), [], [0.0]
    monkeypatch.setattr(remote_store.time, "monotonic", lambda: now[0])

    def fail(key):
        requests.append(key)
        raise TimeoutError

    monkeypatch.setattr(first.remote, "_read", fail)
    assert [first.read_score(str(number)) for number in range(5)] == [None] * 5
    assert len(requests) == 3
    assert message_codes(first.messages) == ["pull-failed"] * 3 + ["remote-store-paused"]
    assert first.find(_commit(first).key)
    for seconds, attempts in ((61, 4), (61, 4), (61, 5)):  # the second pause is twice as long
        now[0] += seconds
        first.read_score("later")
        assert len(requests) == attempts
    monkeypatch.undo()
    assert first.push_pending() == 0
    assert machines.store("two").find(KEY) is not None
    assert (first.read_score("later"), first.remote.failures) == (None, 0)


def test_results_of_outage_are_pushed_at_end_or_counted(machines, monkeypatch):
    first = machines.store("one")
    with monkeypatch.context() as outage:
        outage.setattr(first.remote, "_write", _lose_connection)
        outage.setattr(first.remote, "_size_of", _lose_connection)
        _commit(first)
        for number in range(4):
            first.write_score(str(number), {"n": number})
        assert first.push_pending() == 5
        assert message_codes(first.messages)[-1] == "not-in-remote-store"
    assert first.push_pending() == 0
    two = machines.store("two")
    assert two.find(KEY) is not None
    assert [two.read_score(str(number)) for number in range(4)] == [{"n": number} for number in range(4)]


def _lose_connection(*_):
    raise OSError("connection lost")


@pytest.mark.parametrize(("url", "code"), [
    ("s4://bucket/prefix", "unknown-protocol"), ("http://127.0.0.1:9/store", "store-unreachable"),
    ("file:///proc/store", "missing-bucket"), ("simplecache::file:///store", "invalid-store-url"),
    ("zip://a.zip::file:///store", "invalid-store-url"), ("s3:/bucket/prefix", "invalid-store-url"),
    ("file://", "invalid-store-url"),  # fsspec: the working folder
    ("file:///", "invalid-store-url"),
    # fsspec: below the working folder
    ("file://bucket/prefix", "invalid-store-url"),
    ("memory://", "invalid-store-url"), ("s3://", "invalid-store-url"), ("s3:///prefix", "invalid-store-url"),
])  # fmt: skip
def test_unusable_store_url_is_rejected_before_run(url, code):
    with raises_code(code, InputError):
        open_remote_store(url)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", True), ("s3:/bucket", True), ("simplecache::s3://bucket", True),
        ("C:/store", False), ("store", False), ("./s3:/bucket", False), ("/mnt/a:b", False),
    ],
)  # fmt: skip
def test_mistyped_urls_are_not_folders(text, expected):
    assert is_store_url(text) is expected


def test_file_larger_than_in_manifest_is_not_copied(machines, monkeypatch):
    first, two = machines.store("one"), machines.store("two")
    _commit(first)
    machines.fs.pipe_file(f"{machines.root}/files/{hashlib.sha256(b'hello').hexdigest()}", b"hello" * 1000)
    copied, get_file = [], type(two.remote._fs).get_file

    def count(self, source, target, **options):
        copied.append(source)
        return get_file(self, source, target, **options)

    monkeypatch.setattr(type(two.remote._fs), "get_file", count)
    assert two.find(KEY) is None
    assert message_codes(two.messages) == ["damaged-remote-file"]
    assert not [path for path in copied if path.endswith(hashlib.sha256(b"hello").hexdigest())]


@pytest.mark.parametrize("digits", ["../../secret", "AB" * 32, "ab" * 31, "ab" * 32 + "\n"])
def test_remote_manifest_with_invalid_hash_is_rejected(machines, digits):
    """It is part of the path in the bucket."""
    first = machines.store("one")
    _commit(first)
    manifest = json.loads((first.root / "artifacts" / KEY / "manifest.json").read_text())
    manifest["files"]["deep/b.json"]["sha256"] = digits
    machines.fs.pipe_file(f"{machines.root}/artifacts/{KEY}.json", json.dumps(manifest).encode())
    two = machines.store("two")
    assert (two.find(KEY), message_codes(two.messages)) == (None, ["damaged-remote-file"])


def test_missing_bucket_or_credentials_are_rejected():
    with s3_server("models") as url, pytest.MonkeyPatch.context() as patch:
        assert open_remote_store(f"{url}/prefix").url == f"{url}/prefix"
        with raises_code("missing-bucket", InputError):
            open_remote_store("s3://other/prefix")
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with raises_code("no-store-rights", InputError):
            open_remote_store(f"{url}/other")


def test_missing_package_and_timeout_are_errors(monkeypatch):
    def no_package(url):
        raise ImportError("Install s3fs to access S3")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.core, "url_to_fs", no_package)
        with raises_code("not-installed", MissingDependencyError):
            open_remote_store("s3://bucket/x")
    release = threading.Event()
    monkeypatch.setattr(RemoteStore, "check", lambda remote: release.wait(60))
    monkeypatch.setattr(remote_store, "_ANSWER_S", 0.05)
    with raises_code("store-unreachable", InputError):
        open_remote_store(f"memory://{uuid.uuid4().hex}")
    release.set()


def test_damaged_remote_score_is_absent_and_written_again(machines):
    first, two = machines.store("one"), machines.store("two")
    first.write_score("s", {"bleu": 93.63})
    url = f"{machines.root}/scores/s.json"
    machines.fs.pipe_file(url, machines.fs.cat_file(url).replace(b"93.63", b"99.99"))
    assert two.read_score("s") is None
    assert message_codes(two.messages) == ["damaged-remote-file"]
    two.write_score("s", {"bleu": 93.63})
    three = machines.store("three")
    assert (three.read_score("s"), three.messages) == ({"bleu": 93.63}, [])


def test_changed_remote_manifest_is_absent(machines):
    first, two = machines.store("one"), machines.store("two")
    _commit(first)
    url = f"{machines.root}/artifacts/{KEY}.json"
    machines.fs.pipe_file(url, machines.fs.cat_file(url).replace(b'"seed": 0', b'"seed": 1'))
    assert two.find(KEY) is None
    assert message_codes(two.messages) == ["damaged-remote-file"]


def _save_checkpoint(checkpoints, step):
    folder = checkpoints.next_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / f"{step}.safetensors").write_text(f"weights {step}")
    (folder / CHECKPOINT_FILE).write_text(f"note {step}")
    checkpoints.saved(folder)
    return folder


def test_checkpoint_of_lost_machine_is_resumed_on_another(machines):
    first, two = machines.store("one"), machines.store("two")
    assert not StepCheckpoints(two, "k").next_folder().exists()
    first.pushes_checkpoints = two.pushes_checkpoints = True
    for step in (3, 5):
        _save_checkpoint(StepCheckpoints(first, "k"), step)
    checkpoints = StepCheckpoints(two, "k")
    contents = {path.name: path.read_text() for path in checkpoints.next_folder().iterdir()}
    assert contents == {"5.safetensors": "weights 5", CHECKPOINT_FILE: "note 5"}
    assert not checkpoints.next_folder().exists()  # of the step's second training
    checkpoints.remove()
    assert not machines.fs.find(f"{machines.root}/unfinished")
    checkpoints.remove()  # twice, as by two machines
    assert first.messages == two.messages == []


def test_failed_checkpoint_push_warns(machines, monkeypatch):
    store = machines.store("one")
    store.pushes_checkpoints = True
    monkeypatch.setattr(store.remote, "_write", _lose_connection)
    assert _save_checkpoint(StepCheckpoints(store, "k"), 3).is_dir()
    assert message_codes(store.messages) == ["push-failed"]
