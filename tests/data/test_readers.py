"""The loaders, on small files in the official formats and on every kind of damage to them."""

import lzma
import os
import pickle
from pathlib import Path

import numpy as np
import official_files as official
import pytest
import torch

from vbcaps.data import FACTS, DataError, Dataset, Split, data_folder, hold_out, load_dataset, viewpoints
from vbcaps.data import official as table
from vbcaps.data.cifar10 import read_pickle
from vbcaps.data.resize import resize

LABELS = (torch.arange(60) % 10).tolist()


def assert_images(split: Split, images: np.ndarray, labels: list[int]) -> None:
    assert split.images.dtype == torch.uint8
    assert torch.equal(split.images, torch.from_numpy(images))
    assert split.labels.dtype == torch.int64
    assert split.labels.tolist() == labels


OURS = "files in the original format that are not the published ones: "  # with fewer images

# --- each format, whole


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, name, suffix):
    arrays = official.make_idx(tmp_path / name, n=12, suffix=suffix)
    data = load_dataset(name, tmp_path)
    assert_images(data.train, arrays["train"][:, None], LABELS[:12])
    assert_images(data.test, arrays["t10k"][:, None], LABELS[:12])
    assert data.name == name
    assert data.source.startswith(OURS)
    assert data.classes[9] == {"mnist": "9", "fashion-mnist": "Ankle boot"}[name]


def test_the_source_says_whether_all_published_images_are_there(tmp_path, monkeypatch):
    official.make_idx(tmp_path / "mnist", n=12)
    assert load_dataset("mnist", tmp_path).source == f"{OURS}12 images to train, 12 to test"
    monkeypatch.setitem(table.COUNTS, "mnist", (12, 12))
    assert load_dataset("mnist", tmp_path).source == "original files"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_smallnorb_original(tmp_path, suffix):
    arrays = official.make_norb(tmp_path / "smallnorb", n=20, suffix=suffix)
    whole = load_dataset("smallnorb", tmp_path, size=96)
    assert_images(whole.train, arrays["train"], (torch.arange(20) % 5).tolist())
    assert torch.equal(whole.test.info, torch.from_numpy(official.norb_info(20)).long())
    assert whole.source.startswith(OURS)
    assert whole.classes == ("animal", "human", "airplane", "truck", "car")
    half = load_dataset("smallnorb", tmp_path)
    assert half.train.images.shape == (20, 2, 48, 48)
    assert torch.equal(half.test.images, resize(whole.test.images, 48))


def test_smallnorb_arrays(tmp_path):
    folder = tmp_path / "smallnorb"
    folder.mkdir()
    images = official.pixels(20, 2, 48, 48)
    for part in ("train", "test"):
        with lzma.open(folder / f"{part}_images_48.npy.xz", "wb") as file:
            np.save(file, images)
        np.save(folder / f"{part}_labels.npy", (np.arange(20) % 5).astype(np.uint8))
        np.save(folder / f"{part}_info.npy", official.norb_info(20).astype(np.uint8))
    data = load_dataset("smallnorb", tmp_path)
    assert_images(data.train, images, (torch.arange(20) % 5).tolist())
    assert torch.equal(data.train.info, torch.from_numpy(official.norb_info(20)).long())
    assert data.source.startswith("re-encoded")

    official.make_norb(folder)  # the original files, once there, are preferred
    assert load_dataset("smallnorb", tmp_path).source.startswith(OURS)


def test_svhn(tmp_path):
    arrays = official.make_svhn(tmp_path / "svhn", n=20)
    data = load_dataset("svhn", tmp_path)
    digits = [*range(1, 10), 0] * 2  # 10 in the file is the digit 0
    assert_images(data.train, arrays["train"].transpose(3, 2, 0, 1), digits)
    assert_images(data.test, arrays["test"].transpose(3, 2, 0, 1), digits)
    assert data.source.startswith(OURS)


@pytest.mark.parametrize("version", ["python", "binary"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar10(tmp_path, version, packed):
    arrays = official.make_cifar(tmp_path / "cifar10", version, packed)
    data = load_dataset("cifar10", tmp_path)
    assert_images(data.train, arrays["train"].reshape(-1, 3, 32, 32), LABELS[:50])
    assert_images(data.test, arrays["test"].reshape(-1, 3, 32, 32), LABELS[:10])
    assert data.source.startswith(OURS)


def test_cifar_pickles_are_those_numpy_reads():
    """The hand-written opcodes of the test are a real pickle: Python's own unpickler makes the same of them."""
    images = official.pixels(10, 3072)
    data = official.cifar_pickle(images, LABELS[:10])
    batch = pickle.loads(data, encoding="bytes")
    assert np.array_equal(batch[b"data"], images)
    ours = read_pickle(data, "here")
    assert np.array_equal(ours[0], images)
    assert ours[1].tolist() == batch[b"labels"]
    again = pickle.dumps({b"data": np.asfortranarray(images), b"labels": LABELS[:10]})  # of today's Python and NumPy
    assert np.array_equal(read_pickle(again, "here")[0], images)


@pytest.mark.parametrize("name", ["svhn", "cifar10"])
def test_sheets(tmp_path, name):
    arrays = official.make_sheets(tmp_path / name)
    data = load_dataset(name, tmp_path)
    for part in ("train", "test"):
        split = getattr(data, part)
        assert_images(split, arrays[part], (torch.arange(len(arrays[part])) % 10).tolist())
    assert data.source != "original files"
    (tmp_path / name / "train_01.webp").unlink()
    with pytest.raises(DataError, match=r"train_01\.webp is missing"):
        load_dataset(name, tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_affnist_original(tmp_path, zipped):
    digits = official.make_idx(tmp_path / "mnist", n=10)
    images = official.make_affnist(tmp_path / "affnist" / ("test.mat.zip" if zipped else "test.mat"), zipped=zipped)
    data = load_dataset("affnist", tmp_path)
    assert_images(data.train, digits["train"][:, None], LABELS[:10])
    assert_images(data.test, images[:, None], LABELS[:12])
    assert data.source.startswith(OURS)


def test_affnist_is_generated_where_only_mnist_is(tmp_path):
    official.make_idx(tmp_path / "mnist", n=10)
    data = load_dataset("affnist", tmp_path)
    assert data.test.images.shape == (320, 1, 40, 40)
    assert data.test.labels.tolist() == LABELS[:10] * 32
    assert data.train.images.shape == (10, 1, 28, 28)
    assert "regenerated" in data.source


# --- damage: every file of every format, every kind

MAKERS = {
    "mnist": lambda folder: official.make_idx(folder),
    "mnist, not packed": lambda folder: official.make_idx(folder, suffix=""),
    "smallnorb": lambda folder: official.make_norb(folder, size=8),
    "smallnorb, not packed": lambda folder: official.make_norb(folder, size=8, suffix=""),
    "svhn": lambda folder: official.make_svhn(folder),
    "cifar10, python": lambda folder: official.make_cifar(folder, "python", packed=True),
    "cifar10, python unpacked": lambda folder: official.make_cifar(folder, "python", packed=False),
    "cifar10, binary": lambda folder: official.make_cifar(folder, "binary", packed=True),
    "cifar10, binary unpacked": lambda folder: official.make_cifar(folder, "binary", packed=False),
    "cifar10, sheets": lambda folder: official.make_sheets(folder, n=70),
    "breastmnist": lambda folder: official.make_medmnist(folder),
}


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "readme.html"]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("damage", [official.cut, official.page, lambda path: path.write_bytes(b""), Path.unlink])
def test_damage_names_the_file(tmp_path, kind, damage):
    name = kind.split(",")[0]
    MAKERS[kind](tmp_path / name)
    load_dataset(name, tmp_path)
    for path in files_of(tmp_path / name):
        whole = path.read_bytes()
        damage(path)
        with pytest.raises(DataError) as caught:
            load_dataset(name, tmp_path)
        assert path.stem.split(".")[0] in str(caught.value)
        path.write_bytes(whole)
    load_dataset(name, tmp_path)


@pytest.mark.parametrize("kind", ["mnist", "smallnorb", "svhn", "cifar10, python", "cifar10, binary", "breastmnist"])
def test_bytes_gone_bad_in_a_packed_file(tmp_path, kind):
    """The archives carry sums of their own."""
    name = kind.split(",")[0]
    MAKERS[kind](tmp_path / name)
    for path in files_of(tmp_path / name):
        whole = path.read_bytes()
        official.flip(path)
        with pytest.raises(DataError, match="damaged"):
            load_dataset(name, tmp_path)
        path.write_bytes(whole)


@pytest.mark.parametrize("damage", [official.cut, official.page, official.flip])
def test_damaged_affnist(tmp_path, damage):
    official.make_idx(tmp_path / "mnist")
    path = tmp_path / "affnist" / "test.mat.zip"
    official.make_affnist(path)
    damage(path)
    with pytest.raises(DataError, match=r"test\.mat\.zip"):
        load_dataset("affnist", tmp_path)


def test_wrong_sum(tmp_path, monkeypatch):
    """A file of the official name and size, whose bytes are not the official ones, is refused when it is loaded."""
    official.make_idx(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    monkeypatch.setitem(table.SUMS, (path.name, path.stat().st_size), "0" * 64)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: damaged, its SHA-256"):
        load_dataset("mnist", tmp_path)


def test_wrong_magic(tmp_path):
    official.make_idx(tmp_path / "mnist", suffix="")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(b"\0\0\x0d" + path.read_bytes()[3:])  # floats
    with pytest.raises(DataError, match="begins with 00000d03, not 000008"):
        load_dataset("mnist", tmp_path)
    official.make_norb(tmp_path / "smallnorb", size=8, suffix="")
    path = tmp_path / "smallnorb" / f"{official.NORB['test']}-dat.mat"
    path.write_bytes(b"\x1e\x3d\x4c\x55" + path.read_bytes()[4:])  # the other byte order
    with pytest.raises(DataError, match="magic number 0x554c3d1e"):
        load_dataset("smallnorb", tmp_path)


def test_files_that_do_not_match(tmp_path):
    official.make_idx(tmp_path / "mnist")
    official.write(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", official.idx(np.zeros(9, np.uint8)))
    with pytest.raises(DataError, match="do not match"):
        load_dataset("mnist", tmp_path)
    official.make_norb(tmp_path / "smallnorb", size=8)
    official.write(
        tmp_path / "smallnorb" / f"{official.NORB['train']}-info.mat.gz", official.matrix(official.norb_info(7))
    )
    with pytest.raises(DataError, match=r"training-dat\.mat\.gz: 20 pairs, but labels \(20,\) in .* and info \(7, 4\)"):
        load_dataset("smallnorb", tmp_path)


@pytest.mark.parametrize(
    ("name", "label"), [("mnist", 10), ("smallnorb", 5), ("svhn", 11), ("svhn", 0), ("cifar10", 77)]
)
def test_labels_out_of_range(tmp_path, name, label):
    MAKERS[{"cifar10": "cifar10, binary unpacked"}.get(name, name)](tmp_path / name)
    folder = tmp_path / name
    if name == "mnist":
        official.write(folder / "t10k-labels-idx1-ubyte.gz", official.idx(np.full(10, label, np.uint8)))
    elif name == "smallnorb":
        official.write(folder / f"{official.NORB['test']}-cat.mat.gz", official.matrix(np.full(20, label, np.int32)))
    elif name == "svhn":
        labels = np.full((20, 1), label, np.uint8)
        official.write(folder / "test_32x32.mat", official.mat(X=official.pixels(32, 32, 3, 20), y=labels))
    else:
        data = official.cifar_binary(official.pixels(10, 3072), [label] * 10)
        official.write(folder / "cifar-10-batches-bin" / "test_batch.bin", data)
    with pytest.raises(DataError, match=f"labels must be .*{label}"):
        load_dataset(name, tmp_path)


class Malice:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_pickles_execute_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = official.pixels(10, 3072)
    for batch in (
        {b"data": Malice(), b"labels": [0]},
        {b"data": images, b"labels": [0] * 10, b"more": Malice()},
        {b"data": np.array([Malice()], object), b"labels": [0]},
    ):
        with pytest.raises(DataError, match=r"mkdir"):
            read_pickle(pickle.dumps(batch), "here")
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(DataError, match="not a CIFAR-10 batch"):  # an array of another type, in memory as long
        read_pickle(pickle.dumps({b"data": images.view(np.int8), b"labels": [0] * 10}), "here")


def test_arrays_with_objects_are_refused(tmp_path):
    folder = tmp_path / "svhn"
    official.make_sheets(folder, n=70)
    np.save(folder / "train_labels.npy", np.array([Malice()] * 70), allow_pickle=True)
    with pytest.raises(DataError, match=r"train_labels\.npy"):
        load_dataset("svhn", tmp_path)


def test_missing_files_say_what_to_do(tmp_path):
    for name in list(FACTS)[1:]:
        with pytest.raises(DataError, match=r"is missing.*vbcaps data fetch .*by hand"):
            load_dataset(name, tmp_path)


def test_unknown_name(tmp_path):
    with pytest.raises(DataError, match="nearest: smallnorb"):
        load_dataset("small-norb", tmp_path)
    with pytest.raises(DataError, match="neither a dataset nor a folder"):
        load_dataset(tmp_path / "none")


# --- what a loader must give


def split_of(n: int = 20, classes: int = 5, **change: object) -> Split:
    fields = dict(images=torch.zeros(n, 1, 4, 4, dtype=torch.uint8), labels=torch.arange(n) % classes, info=None)
    return Split(**(fields | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(images=torch.zeros(20, 1, 4, 4).double()), "uint8, uint16 or float32 n c h w, got torch.float64"),
        (dict(images=torch.full((20, 1, 4, 4), float("nan"))), "NaN or infinite"),
        (dict(images=torch.zeros(20, 4, 4, dtype=torch.uint8)), "float32 n c h w"),
        (dict(labels=torch.arange(19)), "int64 labels"),
        (dict(labels=torch.zeros(20)), "int64 labels"),
        (dict(labels=torch.arange(20) % 5 - 1), "labels must be 0 to 4, got -1"),
        (dict(labels=torch.arange(20) % 6), "labels must be 0 to 4, got 5"),
        (dict(info=torch.zeros(20, 3)), "info"),
    ],
)
def test_a_dataset_holds_its_splits_to_their_form(change, message):
    with pytest.raises(DataError, match=message):
        Dataset("d", split_of(), split_of(**change), tuple("abcde"), "")


def test_only_the_test_set_may_be_empty():
    assert len(Dataset("d", split_of(), split_of(0), tuple("abcde"), "").test.labels) == 0
    with pytest.raises(DataError, match="d, training set: there are no images"):
        Dataset("d", split_of(0), split_of(), tuple("abcde"), "")


def test_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("VBCAPS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "vbcaps"
    monkeypatch.setenv("VBCAPS_DATA", str(tmp_path / "named"))
    assert data_folder() == tmp_path / "named"
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"


def test_resize_is_pillows(tmp_path):
    """Bilinear and antialiased, as Pillow's, which works in fixed point: a grey level of difference at most."""
    from PIL import Image

    images = official.pixels(3, 2, 96, 96)
    ours = resize(torch.from_numpy(images), 48)
    for n in range(3):
        for c in range(2):
            theirs = np.asarray(Image.fromarray(images[n, c]).resize((48, 48), Image.Resampling.BILINEAR))
            assert np.abs(ours[n, c].numpy().astype(int) - theirs).max() <= 1


def test_load_at_another_size(tmp_path):
    official.make_idx(tmp_path / "mnist")
    assert load_dataset("mnist", tmp_path, size=14).test.images.shape == (10, 1, 14, 14)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        load_dataset("mnist", tmp_path, size=0)


# --- parts of a dataset


def test_hold_out_is_balanced_and_reproducible():
    split = Split(torch.arange(200).byte().view(200, 1, 1, 1), torch.arange(200) % 3, torch.arange(800).view(200, 4))
    train, held = hold_out(split, 0.2, seed=1)
    assert held.labels.bincount().tolist() == [13, 13, 13]  # of 67, 67, 66
    assert sorted([*train.info[:, 0].tolist(), *held.info[:, 0].tolist()]) == split.info[:, 0].tolist()
    for part in (train, held):  # images, labels and info still belong together, in order
        number = part.info[:, 0] // 4
        assert torch.equal(part.images.flatten(), number.byte())
        assert torch.equal(part.labels, number % 3)
        assert (number.diff() > 0).all()
    assert torch.equal(hold_out(split, 0.2, seed=1)[1].info, held.info)
    assert not torch.equal(hold_out(split, 0.2, seed=2)[1].info, held.info)


def test_hold_out_leaves_no_class_empty():
    few = split_of(n=10, classes=5)
    for fraction in (0.01, 0.99):
        assert [part.labels.bincount().tolist() for part in hold_out(few, fraction, 0)] == [[1] * 5] * 2
    with pytest.raises(DataError, match="class 4 has one image only"):
        hold_out(split_of(n=9, classes=5), 0.5, 0)
    with pytest.raises(ValueError, match="fraction must be between 0 and 1, got 1"):
        hold_out(few, 1, 0)


def test_hold_out_of_objects_leaves_none_in_both_parts():
    """Objects are numbered within their class."""
    label, instance = torch.arange(300) % 3, torch.arange(300) // 3 % 5
    info = torch.stack([instance, *[torch.zeros(300, dtype=torch.int64)] * 3], 1)
    split = Split(torch.zeros(300, 1, 1, 1, dtype=torch.uint8), label, info)
    chosen = set()
    for seed in range(20):
        parts = hold_out(split, 0.2, seed, "objects")
        train, held = ({(c, i) for c, i in zip(p.labels.tolist(), p.info[:, 0].tolist(), strict=True)} for p in parts)
        assert not train & held
        assert [len(p.labels) for p in parts] == [240, 60]
        assert sorted(c for c, _ in held) == [0, 1, 2]
        chosen |= held
    assert len(chosen) == 15
    with pytest.raises(DataError, match="objects can be held out of smallNORB only"):
        hold_out(split_of(n=10, classes=5), 0.2, 0, "objects")
    with pytest.raises(ValueError, match=r"what must be one of .*, got 'toys'"):
        hold_out(split, 0.2, 0, "toys")


def test_viewpoints_are_those_of_table_2(tmp_path):
    official.make_norb(tmp_path / "smallnorb", n=90, size=8)
    data = load_dataset("smallnorb", tmp_path, size=8)
    train, familiar, novel = viewpoints(data, "azimuth")
    degrees = [sorted({10 * a for a in part.info[:, 2].tolist()}) for part in (train, familiar, novel)]
    assert degrees == [[0, 20, 40, 300, 320, 340]] * 2 + [list(range(60, 281, 20))]
    train, familiar, novel = viewpoints(data, "elevation")
    degrees = [sorted({30 + 5 * e for e in part.info[:, 1].tolist()}) for part in (train, familiar, novel)]
    assert degrees == [[30, 35, 40]] * 2 + [[45, 50, 55, 60, 65, 70]]
    assert len(train.labels) == len(familiar.labels) == len(novel.labels) // 2 == 30
    for part, whole in ((train, data.train), (familiar, data.test), (novel, data.test)):
        assert {image.tobytes() for image in part.images.numpy()} <= {x.tobytes() for x in whole.images.numpy()}


def test_viewpoints_of_other_data():
    data = Dataset("mnist", split_of(), split_of(), tuple("abcde"), "")
    with pytest.raises(DataError, match="mnist has no viewpoints"):
        viewpoints(data, "azimuth")
    with pytest.raises(ValueError, match="axis must be one of"):
        viewpoints(data, "lighting")
