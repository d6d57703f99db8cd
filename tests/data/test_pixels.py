"""Files of any number of channels and of more than 8 bits, and the form in which a folder of them is one dataset."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from vbcaps.data import DataError, load_dataset, pixels
from vbcaps.data.folder import survey
from vbcaps.data.pixels import Form, channel_axis, decode, read_header, read_planes

RANDOM = np.random.default_rng(0)
CUBE = RANDOM.random((7, 40, 30), np.float32)  # c h w
DEEP = RANDOM.integers(0, 65536, (5, 40, 40), dtype=np.uint16)


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return path


def folder(root: Path, make, count: int = 4) -> Path:
    """Write ``count`` files of each of two classes; ``make`` takes a path without its suffix and a number."""
    for k, name in enumerate(("dark", "light")):
        (root / name).mkdir(parents=True)
        for i in range(count):
            make(root / name / str(i), 10 * k + i)
    return root


# --- one file


@pytest.mark.parametrize("array", [CUBE, DEEP, DEEP[0], CUBE.astype(np.float64), (CUBE * 255).astype(np.uint8)])
def test_an_array_keeps_its_values(tmp_path, array):
    side = min(array.shape[-2:])
    path = save(tmp_path / "a.npy", array)
    planes = array if array.ndim == 3 else array[None]
    assert np.array_equal(read_planes(path), planes)
    header = read_header(path)
    assert (header.height, header.width, header.form.channels) == (*planes.shape[1:], len(planes))
    found = decode(path, side, header.form)
    assert found.dtype == header.form.dtype
    if planes.shape[1] == planes.shape[2]:
        assert np.array_equal(found, planes)
    last = save(tmp_path / "b.npy", np.moveaxis(planes, 0, -1))
    assert np.array_equal(decode(last, side, header.form), found)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_all_dtypes_are_resized_alike(tmp_path, dtype):
    """The shorter side is resized, the longer cropped, as Pillow does it with pictures."""
    values = (RANDOM.random((4, 40, 60)) * 200).astype(dtype)
    found = decode(save(tmp_path / "a.npy", values), 20, Form(4, np.dtype(dtype).name))
    expected = [
        np.asarray(Image.fromarray(one.astype(np.float32)).resize((20, 20), Image.Resampling.BILINEAR, (10, 0, 50, 40)))
        for one in values
    ]
    assert found.shape == (4, 20, 20)
    assert np.abs(found - np.stack(expected)).max() <= (1e-4 if dtype == np.float32 else 1.01)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((9, 9, 200), 2), ((200, 9, 9), 0), ((3, 40, 40), 0), ((40, 40, 3), 2), ((5, 40, 30), 0), ((40, 30, 5), 2),
        ((2, 2, 40), 2), ((40, 2, 2), 0),
    ],
)  # fmt: skip
def test_the_axis_of_channels(shape, axis):
    assert channel_axis(shape, "auto", "a.npy") == axis
    assert [channel_axis(shape, axes, "a.npy") for axes in ("chw", "hwc")] == [0, 2]


@pytest.mark.parametrize("shape", [(9, 9, 9), (5, 40, 5), (40, 30, 50), (40, 39, 41)])
def test_an_axis_that_is_not_clear_is_asked_for(tmp_path, shape):
    path = save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    with pytest.raises(DataError, match=r"a\.npy: the channels of an image of shape .*--axes chw or --axes hwc"):
        read_header(path)
    assert read_header(path, "hwc").form == Form(shape[2], "uint8")
    assert decode(path, 5, Form(shape[0], "uint8"), "chw").shape == (shape[0], 5, 5)


def test_tiff_files_of_every_kind(tmp_path):
    """Pages, samples, planes, 16 bits and floats, and what Pillow reads by itself."""
    colour = RANDOM.integers(0, 65536, (40, 30, 3), dtype=np.uint16)
    cases = {
        "pages": (DEEP, {}, DEEP),
        "planes": (DEEP, dict(planarconfig="separate", photometric="minisblack"), DEEP),
        "samples": (DEEP.transpose(1, 2, 0), dict(planarconfig="contig", photometric="minisblack"), DEEP),
        "colour": (colour, dict(photometric="rgb"), colour.transpose(2, 0, 1)),
        "grey": (DEEP[0], {}, DEEP[:1]),
        "float": (CUBE[0], {}, CUBE[:1]),
        "cube": (CUBE, {}, CUBE),
        "axes": (CUBE, dict(metadata={"axes": "CYX"}), CUBE),
    }
    for name, (array, options, planes) in cases.items():
        path = tmp_path / f"{name}.tif"
        tifffile.imwrite(path, array, **options)
        assert np.array_equal(read_planes(path), planes), name
        assert read_header(path).form == Form(len(planes), str(planes.dtype)), name
    rgb = RANDOM.integers(0, 256, (40, 30, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "rgb.tiff", rgb, photometric="rgb")
    assert read_header(tmp_path / "rgb.tiff").picture
    Image.fromarray(rgb).save(tmp_path / "rgb.png")
    tiff, png = (decode(tmp_path / name, 24, Form(3, "uint8")) for name in ("rgb.tiff", "rgb.png"))
    assert np.array_equal(tiff, png)


def test_without_tifffile_the_error_names_the_extra(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", DEEP)
    tifffile.imwrite(tmp_path / "grey.tif", DEEP[0])
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    assert np.array_equal(read_planes(tmp_path / "grey.tif"), DEEP[:1])  # Pillow reads it
    with pytest.raises(DataError, match=r"a\.tif: .* pip install 'vbcaps\[tiff\]'"):
        read_header(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[1, np.nan], [2, 3]]), "NaN or infinite"), (np.array([[1, np.inf], [2, 3]]), "NaN or infinite"),
        (np.array([[1, 1e300], [2, 3]]), "NaN or infinite"), (np.zeros((4, 4), bool), "floats, got bool"),
        (np.zeros((4, 4), complex), "other things than plain"), (np.zeros((2, 3, 4, 4)), "one image must be h w"),
        (np.zeros((0, 4)), "got shape"), (np.zeros((3, 4, 4), np.float32), "has 3 channels, expected 1"),
        (np.zeros((4, 4), np.uint16), "has uint16, expected float32"),
    ],
)  # fmt: skip
def test_unusable_arrays_are_named(tmp_path, array, message):
    path = save(tmp_path / "a.npy", array)

    def read():
        read_header(path)
        decode(path, 4, Form(1, "float32"))

    with pytest.raises(DataError, match=rf"a\.npy: .*{message}"):
        read()


def test_damaged_arrays_are_named(tmp_path):
    path = save(tmp_path / "a.npy", CUBE)
    for content in (path.read_bytes()[:-7], b"", b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npy: cannot be read as a NumPy array"):
            read_header(path)
    np.save(path, np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy: cannot be read as a NumPy array"):
        read_header(path)
    tifffile.imwrite(tmp_path / "b.tif", DEEP, bigtiff=True)
    (tmp_path / "b.tif").write_bytes((tmp_path / "b.tif").read_bytes()[:300])
    with pytest.raises(DataError, match=r"b\.tif: cannot be read as an image"):
        decode(tmp_path / "b.tif", 4, Form(5, "uint16"))


# --- a folder


def test_a_folder_keeps_the_depth_and_channels_of_its_files(tmp_path):
    folder(tmp_path / "cubes", lambda path, k: np.save(path, CUBE + k))
    data = load_dataset(tmp_path / "cubes", size=30)
    assert (data.train.images.dtype, data.train.images.shape) == (torch.float32, (6, 7, 30, 30))
    middle = CUBE[:, 5:35] + data.train.labels[0].item() * 10
    assert any(np.array_equal(image.numpy(), middle + k) for image in data.train.images for k in range(4))
    folder(tmp_path / "png", lambda path, k: Image.fromarray(DEEP[0] // 2 + k).save(path.with_suffix(".png")))
    data = load_dataset(tmp_path / "png", size=40)
    assert (data.train.images.dtype, data.train.images.shape[1]) == (torch.uint16, 1)
    assert data.train.images.float().max() > 30_000
    assert survey(tmp_path / "png").form == Form(1, "uint16")


def test_pictures_of_both_depths_have_8_bits(tmp_path):
    both = DEEP[0], (DEEP[0] // 257).astype(np.uint8)
    folder(tmp_path / "a", lambda path, k: Image.fromarray(both[k % 2]).save(path.with_suffix(".png")))
    data = load_dataset(tmp_path / "a", size=40)
    assert data.train.images.dtype == torch.uint8
    assert len({image.numpy().tobytes() for image in data.train.images}) == 1


def test_files_of_different_kinds_are_refused(tmp_path):
    folder(tmp_path / "a", lambda path, k: np.save(path, CUBE if k != 3 else CUBE[:6]))
    with pytest.raises(
        DataError, match=r"dark.0\.npy has 7 channels of float32, .*dark.3\.npy has 6 channels of float32"
    ):
        load_dataset(tmp_path / "a")
    folder(tmp_path / "b", lambda path, k: np.save(path, DEEP[0] if k != 12 else CUBE[0]))
    for read in (load_dataset, survey):
        with pytest.raises(DataError, match=r"1 channel of uint16, .*light.2\.npy has 1 channel of float32"):
            read(tmp_path / "b")
    folder(tmp_path / "c", lambda path, k: np.save(path, CUBE * (np.nan if k == 11 else 1)))
    with pytest.raises(DataError, match=r"light.1\.npy: has values that are NaN or infinite"):
        load_dataset(tmp_path / "c")


def test_grey_and_colour_arrays_of_bytes_are_pictures(tmp_path):
    grey = (CUBE[0] * 255).astype(np.uint8)
    folder(tmp_path / "a", lambda path, k: np.save(path, grey if k % 2 else np.stack([grey] * 3)))
    images = load_dataset(tmp_path / "a", size=30).train.images
    assert images.shape == (6, 3, 30, 30)
    assert torch.equal(images[:, 0], images[:, 2])


def test_the_table_of_axes_is_that_of_recipes():
    from vbcaps.training.recipe import CHOICES

    assert CHOICES["axes"] == pixels.AXES
