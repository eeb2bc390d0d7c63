"""Optional packages: check whether they are installed in a sufficient version, without importing them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from smelt.core.errors import MissingDependencyError


def package_problem(package: str, oldest: str) -> str | None:
    """Return the problem if `package` is not installed at release `oldest` or later, else None."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} {oldest} or later is needed, but it is not installed"
    if _release_number(found) < _release_number(oldest):
        return f"{package} {oldest} or later is needed, but {found} is installed"
    return None


def install_command(package: str, oldest: str) -> str:
    """Return the command that installs `package`."""
    return f"pip install '{package}>={oldest}'"


def require_package(package: str, oldest: str, feature: str) -> None:
    """Require `package` at release `oldest` or a later one.

    Args:
        package: its name in the package index.
        oldest: such as `0.48`; the first two numbers of a release are compared.
        feature: the feature that needs it, for the message.

    Raises:
        MissingDependencyError: it is not installed, or too old.
    """
    lack = package_problem(package, oldest)
    if lack is not None:
        raise MissingDependencyError(
            f"{feature}: {lack}. {install_command(package, oldest)}", code="not-installed"
        )


def _release_number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])
