import pytest

from smelt.core import system
from smelt.core.errors import MissingDependencyError
from smelt.core.system import package_problem, require_package
from tests.support.expected_errors import raises_code


@pytest.fixture
def installed(monkeypatch):
    """Let `thing` be installed at a release."""

    return lambda release: monkeypatch.setattr(system, "installed_version", lambda name: release)


@pytest.mark.parametrize("release", ["0.48", "0.48.0", "0.50.2", "1.0", "0.48.0.dev0"])
def test_recent_release_is_accepted(installed, release):
    installed(release)
    assert package_problem("thing", "0.48") is None
    require_package("thing", "0.48", "work")


@pytest.mark.parametrize(("release", "version_text"), [("0.47.9", " 0.47.9 "), (None, "")])
def test_missing_or_outdated_package_is_reported_with_install_command(installed, release, version_text):
    installed(release)
    with raises_code("not-installed", MissingDependencyError) as excinfo:
        require_package("thing", "0.48", "work")
    fragments = ("work: thing 0.48", version_text, "pip install 'thing>=0.48'")
    assert all(part in str(excinfo.value) for part in fragments)
