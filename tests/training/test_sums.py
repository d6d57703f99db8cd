"""A bit that flips in a file of a run is noticed: no run resumes to other weights without a word."""

import random
import shutil
import warnings

import pytest
import tiny
import torch

from vbcaps.training.checkpoint import FIRST, pack_state, sum_of, unpack_state
from vbcaps.training.environment import other_threads, with_resumption
from vbcaps.training.files import RunError
from vbcaps.training.loop import fit
from vbcaps.training.runfolder import STATE, read_metrics, read_recipe
from vbcaps.weights.tensors import pack_tensors, unpack_tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums") / "run"
    with tiny.in_place_of_data():
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu")
    return folder


def test_every_flipped_bit_of_a_state_is_refused(finished):
    """Of 500 bits, those in the names of JSON and in the numbers; a space more or less in JSON may mean the same."""
    content = (finished / STATE).read_bytes()
    whole = unpack_state(content, "state")
    drawn = random.Random(0)
    for _ in range(500):
        damaged = bytearray(content)
        at = drawn.randrange(len(damaged))
        damaged[at] ^= 1 << drawn.randrange(8)
        try:
            tensors, state = unpack_state(bytes(damaged), "state")
        except RunError:
            continue
        assert state == whole[1], at
        assert all(torch.equal(tensors[name], x) for name, x in whole[0].items()), at


def test_two_numbers_that_change_places_are_refused(finished):
    tensors, fields = unpack_tensors((finished / STATE).read_bytes(), "state")
    name = next(name for name, x in tensors.items() if x.numel() > 1 and x.unique().numel() > 1)
    tensors[name] = tensors[name].flatten().roll(1).reshape(tensors[name].shape)
    with pytest.raises(RunError, match="its checksum is not that of its content"):
        unpack_state(pack_tensors(tensors, fields), "state")
    fields.pop("sum")
    assert unpack_state(pack_tensors(tensors, fields | dict(sum=sum_of(tensors, fields))), "state")[1].epoch == 2


def test_a_state_of_the_version_before_is_read(finished):
    tensors, state = unpack_state((finished / STATE).read_bytes(), "state")
    fields = dict(format=FIRST, **state._asdict())
    assert unpack_state(pack_tensors(tensors, fields), "state")[1] == state
    assert unpack_tensors(pack_state(tensors, state), "state")[1]["format"] != FIRST


@pytest.mark.parametrize(
    ("name", "before", "after", "read"),
    [("metrics.csv", "0.", "1.", read_metrics), ("recipe.json", '"batch": 36', '"batch": 26', read_recipe)],
)
def test_a_finished_run_whose_table_or_recipe_changed_says_so(finished, tmp_path, name, before, after, read):
    folder = shutil.copytree(finished, tmp_path / "run")
    text = (folder / name).read_text()
    (folder / name).write_bytes(text.replace("\n", "\r\n").encode())  # as an editor on Windows saves it
    assert read(folder) == read(finished)
    (folder / name).write_text(text.replace(before, after, 1))
    with pytest.raises(
        RunError, match=rf"{name} is damaged or was changed: its SHA-256 is not the one in result\.json"
    ):
        read(folder)
    (folder / "result.json").unlink()
    read(folder)


def test_a_run_that_resumes_with_other_threads_says_so(finished, tmp_path):
    """PyTorch's sums depend on how many threads there are, ours do not."""
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "result.json").unlink()
    with tiny.in_place_of_data():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)
        (folder / "result.json").unlink()
        torch.set_num_threads(2)  # which the context sets back
        with pytest.warns(UserWarning, match="was trained with 1 threads and goes on with 2: .* OMP_NUM_THREADS=1"):
            fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)


def test_an_environment_of_another_kind_is_refused_by_name():
    with pytest.raises(RunError, match=r"environment\.json is damaged: resumed must be a list, got 'x'"):
        with_resumption(dict(resumed="x"), {})
    assert other_threads({}, dict(device_type="cpu", threads=2)) == ""
    assert other_threads(dict(threads=1), dict(device_type="cuda", threads=2)) == ""
