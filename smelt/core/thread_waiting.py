"""How the threads of torch wait for each other: set before torch is imported."""

from __future__ import annotations

import os

WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
_SPINS = "3000"


def limit_spinning() -> None:
    """Let torch's threads wait for each other without spinning for long, unless the user has set how.

    By default a thread of GNU OpenMP spins for milliseconds where another one is not running. On a machine
    with other work that takes five times the processor time of one thread, and as much longer. A limit of
    3,000 loops, 0.05 to 0.1 ms, covers the time between two operators of a model. It is read when torch is
    imported. Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPIN_COUNT, _SPINS)
