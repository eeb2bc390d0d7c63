"""Packages that only some settings need: whether they are there, and new enough, without importing them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from smelt.core.errors import MissingDependencyError


def package_lack(package: str, oldest: str) -> str | None:
    """Say what is wrong with `package` where it is not installed at release `oldest` or a later one."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} {oldest} or later is needed, and it is not installed"
    if _number(found) < _number(oldest):
        return f"{package} {oldest} or later is needed, and {found} is installed"
    return None


def how_to_get(package: str, oldest: str) -> str:
    """Return the command that installs `package`."""
    return f"pip install '{package}>={oldest}'"


def require(package: str, oldest: str, what: str) -> None:
    """Require `package` at release `oldest` or a later one.

    Args:
        package: by its name in the package index.
        oldest: `0.48`; of a release the first two numbers are compared.
        what: needs it, for the message.

    Raises:
        MissingDependencyError: there is none, or an older one.
    """
    lack = package_lack(package, oldest)
    if lack is not None:
        raise MissingDependencyError(f"{what}: {lack}. {how_to_get(package, oldest)}", code="not-installed")


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])
