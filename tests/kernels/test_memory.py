"""Memory that the CPU kernels use again."""

import gc
import mmap
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from memory import resident

from vbcaps import PrimaryCaps
from vbcaps.kernels.cpu.memory import MAPPED, PAGE, REGION, SMALLEST, WINDOW, Memory, Region
from vbcaps.training.memory import freed_memory_kept

pytestmark = pytest.mark.skipif(not MAPPED, reason="other systems' own memory is used")
MB = 1 << 20
LIKE = torch.empty(())


def of_megabytes(memory, size):
    return memory.empty(LIKE, size * MB // 4)


def test_what_is_freed_serves_the_next():
    memory = Memory()
    first, second = of_megabytes(memory, 3), of_megabytes(memory, 2)
    place = first.data_ptr()
    assert second.data_ptr() == place + 3 * MB
    del first
    third, fourth = of_megabytes(memory, 1), of_megabytes(memory, 2)
    assert [x.data_ptr() - place for x in (third, fourth)] == [0, MB]
    del second, fourth
    assert of_megabytes(memory, 4).data_ptr() == place + MB


def test_a_view_keeps_its_memory():
    memory = Memory()
    x = memory.empty(LIKE, 2, 3, MB // 4)
    assert x.shape == (2, 3, MB // 4)
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    last = x.fill_(7)[1, 2, -5:]
    place = x.data_ptr()
    del x
    gc.collect()
    other = of_megabytes(memory, 6).zero_()
    assert other.data_ptr() != place
    assert last.tolist() == [7] * 5
    del last
    assert of_megabytes(memory, 6).data_ptr() == place


def test_what_lies_elsewhere():
    memory, small = Memory(), SMALLEST // 4 - 1
    others = LIKE.double(), LIKE.to("meta")
    found = [memory.empty(LIKE, small), *(memory.empty(like, SMALLEST) for like in others)]
    assert not memory.regions
    assert [(x.dtype, x.device.type) for x in found[1:]] == [(torch.float64, "cpu"), (torch.float32, "meta")]


def test_gaps():
    region = Region(8 * PAGE)
    places = [region.take(PAGE) for _ in range(8)]
    assert places == list(range(0, 8 * PAGE, PAGE))
    assert region.take(PAGE) is None
    assert region.gaps == []
    for k in (1, 5, 2, 7, 0):
        region.give(k * PAGE, (k + 1) * PAGE)
    assert region.gaps == [(0, 3 * PAGE), (5 * PAGE, 6 * PAGE), (7 * PAGE, 8 * PAGE)]
    assert region.take(2 * PAGE) == 0
    assert region.take(2 * PAGE) is None
    assert region.take(PAGE) == 2 * PAGE


def test_regions_grow_until_the_system_refuses(monkeypatch):
    memory = Memory()
    kept = [memory.empty(LIKE, REGION // 4), memory.empty(LIKE, 3 * REGION // 4), memory.empty(LIKE, SMALLEST)]
    assert [len(region.map) for region in memory.regions] == [REGION, 3 * REGION, 4 * REGION]
    assert len({x.data_ptr() for x in kept}) == 3

    def refuse(size):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("vbcaps.kernels.cpu.memory.Region", refuse)
    assert Memory().empty(LIKE, SMALLEST).shape == (SMALLEST,)


def test_unused_memory_goes_back():
    memory, size = Memory(), 64 * MB
    before = resident("VmRSS")
    large = of_megabytes(memory, 64).fill_(1)
    kept = of_megabytes(memory, 1).fill_(3)  # behind the large one
    del large
    assert resident("VmRSS") - before > 0.9 * size  # for the next one
    for _ in range(3 * WINDOW):
        of_megabytes(memory, 2)
    assert resident("VmRSS") - before < 0.2 * size
    of_megabytes(memory, 64).fill_(1)
    assert resident("VmRSS") - before > 0.9 * size
    memory.give_back()
    assert resident("VmRSS") - before < 0.2 * size
    assert kept.unique().tolist() == [3]
    assert of_megabytes(memory, 2).fill_(5).unique().tolist() == [5]


def test_the_end_of_a_training_gives_all_back(monkeypatch):
    memory = Memory()
    monkeypatch.setattr("vbcaps.training.memory.MEMORY", memory)
    before = resident("VmRSS")
    with freed_memory_kept(torch.device("cpu")):
        of_megabytes(memory, 64).fill_(1)
        assert resident("VmRSS") - before > 50 * MB
    assert resident("VmRSS") - before < 15 * MB


def test_threads_take_and_free_at_the_same_time():
    memory = Memory()

    def work(seed):
        mine = []
        for k in range(200):
            mine.append(memory.empty(LIKE, SMALLEST // 4 + 1000 * ((seed * k) % 7)).fill_(seed))
            if k % 3:
                x = mine.pop(k % len(mine))
                assert x[0] == x[-1] == seed

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(1, 7)))
    memory.give_back()
    assert memory.regions
    assert all(region.gaps == [(0, len(region.map))] for region in memory.regions)


def test_a_child_process_takes_memory_while_a_thread_of_its_parent_does(monkeypatch):
    memory = Memory()
    monkeypatch.setattr("vbcaps.kernels.cpu.memory.MEMORY", memory)
    x = memory.empty(LIKE, SMALLEST)
    x[:5] = 1
    with memory.lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # instead of waiting for a lock that nobody gives back
            try:
                y = memory.empty(LIKE, SMALLEST)
                y[:5] = 2
                os._exit(0 if x[:5].tolist() == [1] * 5 and y.data_ptr() != x.data_ptr() else 1)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert x[:5].tolist() == [1] * 5


@pytest.mark.parametrize("batch", [2, 40])  # small and large tensors
def test_a_result_may_be_changed_in_place_unless_its_gradient_needs_it(batch):
    layer, x = PrimaryCaps(4, 8), torch.randn(batch, 4, 14, 14)
    poses = layer(x).poses
    assert poses.numel() * 4 > SMALLEST or batch == 2
    with torch.no_grad():
        again = layer(x).poses
        torch.testing.assert_close(again.clone().mul_(2), again.mul_(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as of a sigmoid
        poses.mul_(2).sum().backward()


def test_without_huge_pages_and_with_few_addresses(monkeypatch):
    """A region as large as the tensor, where a larger one is refused."""
    asked, mapped = [], mmap.mmap

    def limited(number, size, **options):
        asked.append(size)
        if size > REGION // 2:
            raise OSError(12, "Cannot allocate memory")
        return mapped(number, size, **options)

    monkeypatch.setattr(mmap, "mmap", limited)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    memory = Memory()
    x = of_megabytes(memory, 3)
    assert asked == [REGION, 3 * MB]
    assert len(memory.regions) == 1
    assert x.shape == (3 * MB // 4,)
