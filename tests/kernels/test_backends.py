"""The choice between reference and kernels at its edges: batches past 32 bits, a second device, no memory left."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vbcaps import Capsules, ConvCaps, kernels
from vbcaps.kernels.backend import Votes
from vbcaps.kernels.ops import on_its_device
from vbcaps.routing import EMRouting, VBRouting
from vbcaps.routing.fields import conv_fields

pytest.importorskip("triton")
from vbcaps.kernels.triton.launch import Triton

TRITON = Triton()

META = torch.device("meta")  # shapes without memory


# --- 32 bits ----------------------------------------------------------------------------------------------------


def layer_on_meta(size, types, parents, kernel, stride, iters=3):
    fields = conv_fields(size, size, types, (kernel, kernel), (stride, stride), META)
    W = torch.empty(kernel * kernel * types, parents, 4, 4, device=META)
    return W, fields, VBRouting(parents, iters=iters)


def largest_buffer(W, fields, iters, images):
    """Numbers in the largest buffer a kernel walks through from one pointer, as the fused routing allocates them."""
    C, J, (L, _) = len(fields.seen), W.shape[1], fields.child.shape
    a = torch.empty(C, images, device=META)
    v = Votes(a, TRITON.new_poses(a, C, images), W, None, *fields, "triton")
    kept = max(iters - 1, 1)  # sets of responsibilities
    parts = TRITON.new_poses(a, TRITON.parts(v), L, J, images)
    buffers = v.pose, TRITON.new_slots(v, kept), parts, TRITON.new_terms(v, iters)
    return max(x.numel() for x in buffers)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(3, 60),
    types=st.integers(1, 64),
    parents=st.integers(1, 64),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    iters=st.integers(1, 5),
)
def test_the_largest_batch_fits_into_32_bits_and_a_few_more_images_do_not(size, types, parents, kernel, stride, iters):
    W, fields, _ = layer_on_meta(size, types, parents, kernel, stride)
    most = TRITON.most_images(W, fields, iters)
    assert largest_buffer(W, fields, iters, most) < 2**31
    if most < 8 * ((2**16 - 1) // -(-parents // 16)):
        assert largest_buffer(W, fields, iters, most + 48) >= 2**31


def test_the_largest_batches_of_layers_counted_by_hand():
    """The paper's first: 36 fields of 144 slots, 16 types, two kept sets of responsibilities."""
    assert (
        TRITON.most_images(*layer_on_meta(14, 16, 16, 3, 2)[:2], iters=3) == 12944
    )  # 2^31 / (2 * 36 * 144 * 16) = 12945.4
    # One slot a field: the terms are the largest, 11 poses for each parent.
    assert (
        TRITON.most_images(*layer_on_meta(14, 1, 8, 1, 1)[:2], iters=3) == 7776
    )  # 2^31 / (196 * 8 * 16 * 11) = 7781.7
    # One parent over the whole map: the poses of its children are.
    assert (
        TRITON.most_images(*layer_on_meta(14, 16, 1, 14, 1)[:2], iters=3) == 42792
    )  # 2^31 / (196 * 16 * 16) = 42799.0


def test_layers_that_no_batch_of_fits_are_left_to_the_reference():
    W, fields, _ = layer_on_meta(4, 16, 16, 3, 1)
    assert TRITON.most_images(W, fields, 3) > 0
    assert TRITON.most_images(torch.empty(2**17, 2**10, 4, 4, device=META), fields, 3) == 0
    assert TRITON.most_images(*layer_on_meta(255, 1, 1, 1, 1)[:2], iters=3) > 0
    assert TRITON.most_images(*layer_on_meta(256, 1, 1, 1, 1)[:2], iters=3) == 0  # 2^16 fields


class OnAGPU:
    """What the choice looks at of activations that would not fit here."""

    is_cuda, dtype = True, torch.float32

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return self.images


@pytest.mark.parametrize("iters", [1, 3, 5])
def test_auto_takes_the_reference_and_triton_is_an_error_one_image_past_the_largest_batch(iters):
    W, fields, routing = layer_on_meta(14, 16, 16, 3, 2, iters)
    most = TRITON.most_images(W, fields, iters)
    pose = torch.empty(1, 1, 4, 4, device=META)
    for name in ("auto", "triton"):
        assert kernels.backend_for(name, routing, OnAGPU(most), pose, W, fields).name == "triton"
    assert kernels.backend_for("auto", routing, OnAGPU(most + 1), pose, W, fields) is None
    with pytest.raises(ValueError, match=f"at most {most} images in this layer, got {most + 1}.*backend='reference'"):
        kernels.backend_for("triton", routing, OnAGPU(most + 1), pose, W, fields)


@pytest.mark.parametrize("routing", ["vb", "em"])
def test_a_layer_asks_before_it_launches(routing, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(Triton, "most_images", lambda *_: 1)
    layer = ConvCaps(2, 3, 2, routing=routing, backend="triton")
    with pytest.raises(ValueError, match="at most 1 images in this layer, got 2"):
        layer(Capsules(torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 4, 4)))


# --- devices ----------------------------------------------------------------------------------------------------


def test_an_op_runs_with_its_tensors_device_as_the_current_one(monkeypatch):
    current = [0]

    class DeviceOf:
        def __init__(self, x):
            self.device = x

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)

    @on_its_device
    def op(x: int, y: int) -> tuple[int, int]:
        """Says where it ran."""
        return current[-1], y

    assert op(torch.tensor(3), 4) == (3, 4)
    assert current == [0]
    assert op.__doc__ == "Says where it ran."


def test_on_a_cpu_there_is_no_device_to_change():
    assert on_its_device(torch.neg)(torch.ones(2)).tolist() == [-1, -1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("routing", ["vb", "em"])
def test_a_second_device_gives_what_the_first_does(routing):
    torch.manual_seed(0)
    layer = ConvCaps(4, 5, 3, 2, routing=routing)
    a, pose = torch.rand(3, 7, 7, 4), torch.randn(3, 7, 7, 4, 4, 4)
    found = []
    for device in ("cuda:0", "cuda:1"):
        layer = layer.to(device)
        out = layer(Capsules(a.to(device), pose.to(device)))
        (gradient,) = torch.autograd.grad(out.poses.square().sum() + out.logits.pow(3).sum(), layer.weight)
        found.append((out.logits.cpu(), out.poses.detach().cpu(), gradient.cpu()))
    assert torch.cuda.current_device() == 0
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [VBRouting, EMRouting])
def test_running_out_of_memory_is_pytorchs_own_error(make, monkeypatch):
    """Nothing between the allocation and the caller turns it into something else, or tries another way."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def none_left(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    fields = conv_fields(3, 3, 2, (2, 2), (1, 1), torch.device("cpu"))
    a, pose, W = torch.rand(2, 18), torch.randn(2, 18, 4, 4), torch.randn(8, 3, 4, 4)
    monkeypatch.setattr(torch.Tensor, "new_empty", none_left)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1 GiB"):
        kernels.route(make(3), a, pose, W, fields, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("routing", ["vb", "em"])
def test_a_batch_past_the_cards_memory_is_an_error_and_the_next_one_works(routing):
    layer = ConvCaps(16, 16, 3, 2, routing=routing, backend="triton").cuda()
    a, pose = torch.rand(4000, 14, 14, 16, device="cuda"), torch.randn(4000, 14, 14, 16, 4, 4, device="cuda")
    torch.cuda.empty_cache()
    share = torch.cuda.memory_reserved() / torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share + 0.01))
    try:
        with pytest.raises(torch.OutOfMemoryError):  # its responsibilities alone are 2.7 GB
            layer(Capsules(a, pose))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert layer(Capsules(a[:2], pose[:2])).logits.isfinite().all()


def test_an_unknown_backend_is_an_error_that_names_them():
    with pytest.raises(
        ValueError, match="backend must be 'auto', 'reference', 'plain', 'triton' or 'cpu', got 'tritn'"
    ):
        kernels.backend.backend_named("tritn")
