import pytest

from smelt.core import packages
from smelt.core.errors import MissingDependencyError
from smelt.core.packages import package_lack, require


@pytest.fixture
def installed(monkeypatch):
    """Let `thing` be installed at a release."""

    def at(release):
        def version(name):
            if release is None:
                raise packages.PackageNotFoundError(name)
            return release

        monkeypatch.setattr(packages, "version", version)

    return at


@pytest.mark.parametrize("release", ["0.48", "0.48.0", "0.50.2", "1.0", "0.48.0.dev0"])
def test_a_release_that_is_new_enough_lacks_nothing(installed, release):
    installed(release)
    assert package_lack("thing", "0.48") is None
    require("thing", "0.48", "work")


@pytest.mark.parametrize(
    ("release", "words"), [("0.47.9", "0.47.9 is installed"), (None, "it is not installed")]
)
def test_a_package_that_is_absent_or_too_old_is_told_with_how_to_get_it(installed, release, words):
    installed(release)
    with pytest.raises(MissingDependencyError) as caught:
        require("thing", "0.48", "work")
    assert str(caught.value) == f"work: thing 0.48 or later is needed, and {words}. pip install 'thing>=0.48'"
