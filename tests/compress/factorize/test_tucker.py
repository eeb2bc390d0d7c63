"""Tucker-2 and CP lose no more than tensorly's, and nothing where the kernel has the rank."""

import pytest
import torch

from smelt.compress.factorize import convolutions


def kernel(seed=0, shape=(12, 10, 3, 3)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ranks", [(6, 7), (1, 12), (10, 3)])
def test_tucker_loses_no_more_than_tensorly(ranks):
    from tensorly.decomposition import partial_tucker
    from tensorly.tucker_tensor import tucker_to_tensor

    whole, (inner, outer) = kernel(), ranks
    into, core, out = convolutions.tucker2_decompose(whole, inner, outer)
    assert (into.shape, core.shape, out.shape) == ((10, inner), (outer, inner, 3, 3), (12, outer))
    (theirs, factors), _ = partial_tucker(
        whole.numpy(), rank=[outer, inner], modes=[0, 1], n_iter_max=100, tol=1e-9
    )
    whole_factors = [*factors, torch.eye(3).numpy(), torch.eye(3).numpy()]
    expected = (torch.tensor(tucker_to_tensor((theirs, whole_factors))) - whole).norm()
    assert float((convolutions.tucker2_kernel(into, core, out) - whole).norm()) == pytest.approx(
        float(expected), rel=1e-3
    )


def test_tucker_of_the_channels_out_alone_is_the_best_matrix_of_its_rank():
    whole = kernel(1)
    _, core, out = convolutions.tucker2_decompose(whole, None, 5)
    dropped = torch.linalg.svdvals(whole.flatten(1))[5:].square().sum().sqrt()
    assert float((convolutions.tucker2_kernel(None, core, out) - whole).norm()) == pytest.approx(
        float(dropped)
    )


def test_a_kernel_of_the_rank_is_kept_whole():
    factors = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double() for n in (12, 10, 3, 3)]
    whole = convolutions.cp_kernel(factors)
    assert (
        float((convolutions.cp_kernel(convolutions.cp_decompose(whole, 4, 0)) - whole).norm() / whole.norm())
        < 1e-3
    )
    assert (
        float(
            (convolutions.tucker2_kernel(*convolutions.tucker2_decompose(whole, 4, 4)) - whole).norm()
            / whole.norm()
        )
        < 1e-10
    )


def test_cp_loses_no_more_than_tensorly_and_its_vectors_have_one_size():
    import tensorly
    from tensorly.decomposition import parafac

    whole = kernel(2, (8, 6, 3, 3))
    ours = convolutions.cp_decompose(whole, 10, 0)
    theirs = parafac(whole.numpy(), rank=10, n_iter_max=200, init="svd", random_state=0)
    expected = (torch.tensor(tensorly.cp_to_tensor(theirs)) - whole).norm()
    assert float((convolutions.cp_kernel(ours) - whole).norm()) < 1.05 * float(expected)
    norms = torch.stack([factor.norm(dim=0) for factor in ours])
    assert torch.allclose(norms, norms[:1].expand_as(norms))
