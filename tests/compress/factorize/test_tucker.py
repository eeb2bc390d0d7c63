"""Tucker-2 and CP lose no more than tensorly's, and nothing where the kernel has the rank."""

import pytest
import torch

from smelt.compress.factorize import convolutions


def kernel(seed=0, shape=(12, 10, 3, 3)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ranks", [(6, 7), (1, 12), (10, 3)])
def test_tucker_error_is_not_above_tensorly(ranks):
    from tensorly.decomposition import partial_tucker
    from tensorly.tucker_tensor import tucker_to_tensor

    full_kernel, (inner, outer) = kernel(), ranks
    into, core, out = convolutions.tucker2_decompose(full_kernel, inner, outer)
    assert (into.shape, core.shape, out.shape) == ((10, inner), (outer, inner, 3, 3), (12, outer))
    (reference_core, factors), _ = partial_tucker(
        full_kernel.numpy(), rank=[outer, inner], modes=[0, 1], n_iter_max=100, tol=1e-9
    )
    whole_factors = [*factors, torch.eye(3).numpy(), torch.eye(3).numpy()]
    expected = (torch.tensor(tucker_to_tensor((reference_core, whole_factors))) - full_kernel).norm()
    assert float((convolutions.tucker2_kernel(into, core, out) - full_kernel).norm()) == pytest.approx(
        float(expected), rel=1e-3
    )


def test_tucker1_over_output_channels_equals_best_low_rank_matrix():
    full_kernel = kernel(1)
    _, core, out = convolutions.tucker2_decompose(full_kernel, None, 5)
    dropped = torch.linalg.svdvals(full_kernel.flatten(1))[5:].square().sum().sqrt()
    assert float((convolutions.tucker2_kernel(None, core, out) - full_kernel).norm()) == pytest.approx(
        float(dropped)
    )


def test_kernel_of_given_rank_is_exact():
    factors = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double() for n in (12, 10, 3, 3)]
    full_kernel = convolutions.cp_kernel(factors)
    assert (
        float(
            (convolutions.cp_kernel(convolutions.cp_decompose(full_kernel, 4, 0)) - full_kernel).norm()
            / full_kernel.norm()
        )
        < 1e-3
    )
    assert (
        float(
            (
                convolutions.tucker2_kernel(*convolutions.tucker2_decompose(full_kernel, 4, 4)) - full_kernel
            ).norm()
            / full_kernel.norm()
        )
        < 1e-10
    )


def test_cp_error_is_not_above_tensorly_and_factors_are_balanced():
    import tensorly
    from tensorly.decomposition import parafac

    full_kernel = kernel(2, (8, 6, 3, 3))
    factors = convolutions.cp_decompose(full_kernel, 10, 0)
    reference = parafac(full_kernel.numpy(), rank=10, n_iter_max=200, init="svd", random_state=0)
    expected = (torch.tensor(tensorly.cp_to_tensor(reference)) - full_kernel).norm()
    assert float((convolutions.cp_kernel(factors) - full_kernel).norm()) < 1.05 * float(expected)
    norms = torch.stack([factor.norm(dim=0) for factor in factors])
    assert torch.allclose(norms, norms[:1].expand_as(norms))
