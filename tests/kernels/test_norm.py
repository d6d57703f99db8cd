"""The Triton kernels of BatchNorm against PyTorch, in Triton's interpreter or on a GPU."""

import pytest
import torch

from vbcaps.kernels.norm import take_in
from vbcaps.norm import BatchNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.parametrize(("a", "j", "b"), [(5, 3, 7), (1, 2, 40), (9, 1, 70), (2, 2, 1100), (70, 2, 1)])
def test_batch_norm_kernels_equal_pytorch(a, j, b):
    """Outputs, gradient and running statistics, for values far from zero too."""
    norm_triton = pytest.importorskip("vbcaps.kernels.triton.norm")
    torch.manual_seed(0)
    x = (3 * torch.randn(a, j, b) + 100).to(DEVICE)
    reference = BatchNorm(j).double().to(DEVICE)
    x64, x32 = x.double().requires_grad_(), x.clone().requires_grad_()
    y64 = reference(x64)
    upstream = torch.randn_like(y64)
    (g64,) = torch.autograd.grad(y64, x64, upstream)

    running = (torch.zeros(j, device=DEVICE), torch.ones(j, device=DEVICE), torch.tensor(0, device=DEVICE))
    y, _, mean, var = norm_triton.batch_norm(x32, 1e-5)
    norm_triton.keep_statistics(mean, var, *running, 0.1)
    (g32,) = torch.autograd.grad(y, x32, upstream.float())
    torch.testing.assert_close(y.double(), y64, rtol=0, atol=1e-5)  # 100 / 3 times the rounding of 100
    torch.testing.assert_close(g32.double(), g64, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(running[0].double(), reference.running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(running[1].double(), reference.running_var, rtol=1e-5, atol=0)
    for batches in (1, 7, 998, 999, 5000):  # the share of the next one falls from 1 to momentum
        reference.num_batches_tracked.fill_(batches)
        running[2].fill_(batches)
        take_in(reference.running(), mean.double() + batches, 2 * var.double(), 0.1)
        norm_triton.keep_statistics(mean + batches, 2 * var, *running, 0.1)
        torch.testing.assert_close(running[0].double(), reference.running_mean, rtol=1e-5, atol=0)
        torch.testing.assert_close(running[1].double(), reference.running_var, rtol=1e-5, atol=0)
    assert int(running[2]) == 5001
