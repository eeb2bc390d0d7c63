"""Numbers too small for a float's exponent, while a run trains."""

import subprocess
import sys

from smelt.compress.training_state import denormals_as_zero

# 2 threads, because the setting is one of each thread
SUM = """
import numpy
import torch
from smelt.compress.training_state import denormals_as_zero
torch.set_num_threads(2)
tiny = torch.from_numpy(numpy.full(1 << 20, 2.0**-130, numpy.float32))  # no product of torch yet
def count():
    return int((tiny * 1.0).view(torch.int32).count_nonzero())
if {inside}:
    with denormals_as_zero():
        print(count())
else:
    print(count())
"""


def _denormals_left(inside):
    done = subprocess.run(
        [sys.executable, "-c", SUM.format(inside=inside)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_denormals_are_zero_in_all_threads_of_torch():
    assert _denormals_left(inside=False) == 1 << 20
    assert _denormals_left(inside=True) == 0


def test_the_processor_is_left_as_it_was():
    least = sys.float_info.min
    with denormals_as_zero():
        assert least / 2 == 0
        with denormals_as_zero():
            pass
        assert least / 2 == 0
    assert least / 2 > 0
