"""How much memory inverting a second moment takes; what it gives is tested with GPTQ, which goes along it."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smelt.calibration.statistics import empty_statistics, inverse_cholesky


class Held(TorchDispatchMode):
    """Counts the elements of all tensors that operations made and that are still there. most: at once."""

    def __init__(self):
        super().__init__()
        self.made, self.most = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.made[tensor.untyped_storage().data_ptr()] = weakref.ref(tensor), tensor.numel()
        held = [count for tensor, count in self.made.values() if tensor() is not None]
        self.most = max(self.most, sum(held))
        return result


def test_beside_the_second_moment_two_matrices_are_in_memory_at_most():
    found = empty_statistics(200, second=True)
    found.update(torch.randn(1000, 200, generator=torch.Generator().manual_seed(0)))
    with Held() as held:
        factor, _ = inverse_cholesky(found)
    assert factor.shape == (200, 200)
    assert 2 * 200**2 <= held.most < 2.2 * 200**2
