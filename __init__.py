"""A checkout of smelt, seen from the folder above it: `import smelt` there finds this file.

Without it Python takes the checkout, where it is called smelt, for a package without content, which stands
before an editable install. So this file gives way to the package that is installed.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_HERE = os.path.dirname(os.path.realpath(__file__))


def _installed() -> ModuleSpec | None:
    """Return where the package is, as Python would find it if the checkout were not on its way."""
    elsewhere = [path for path in sys.path if os.path.realpath(os.path.join(path, "smelt")) != _HERE]
    for finder in sys.meta_path:
        spec = finder.find_spec("smelt", elsewhere if finder is PathFinder else None)
        if spec is not None and spec.loader is not None and spec.has_location:
            return spec
    return None


if __name__ == "smelt":  # not where a test runner looks at the folder
    _spec = _installed()
    if _spec is None or _spec.loader is None:
        raise ImportError(
            f"{_HERE} is a checkout of smelt, and the package is not installed. Install it"
            f" (pip install -e {_HERE}), or run Python in another folder.",
            name="smelt",
            path=_HERE,
        )
    sys.modules["smelt"] = importlib.util.module_from_spec(_spec)  # import gives what stands there
    _spec.loader.exec_module(sys.modules["smelt"])
