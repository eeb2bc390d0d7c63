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
        live_counts = [count for tensor, count in self.made.values() if tensor() is not None]
        self.most = max(self.most, sum(live_counts))
        return result


def test_at_most_two_matrices_are_allocated_in_addition_to_the_second_moment():
    statistics = empty_statistics(200, second=True)
    statistics.update(torch.randn(1000, 200, generator=torch.Generator().manual_seed(0)))
    with Held() as tracker:
        factor, _ = inverse_cholesky(statistics)
    assert factor.shape == (200, 200)
    assert 2 * 200**2 <= tracker.most < 2.2 * 200**2
