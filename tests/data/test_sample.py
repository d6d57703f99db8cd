"""The sample of Fashion-MNIST in the package."""

import shutil
from pathlib import Path

import official_files as official
import pytest
import torch
from PIL import Image

import vbcaps.data
from vbcaps.data import DataError, load_dataset
from vbcaps.data import sample as module
from vbcaps.data.sample import PER_CLASS, SHEETS, make, sample

# From the official training set: the mean and the deviation of Fashion-MNIST are 0.2860 and 0.3530.
MEAN, STD = 0.286, 0.353


def test_the_sample_is_balanced_and_looks_like_fashion_mnist(monkeypatch, tmp_path):
    monkeypatch.setenv("VBCAPS_DATA", str(tmp_path))  # it needs no files
    data = load_dataset("sample")
    assert data.train.images.shape == (8000, 1, 28, 28)
    assert data.test.images.shape == (1000, 1, 28, 28)
    for split, count in ((data.train, 800), (data.test, 100)):
        assert split.labels.bincount().tolist() == [count] * 10
        assert split.labels[:50].bincount().tolist() == [5] * 10
    values = data.train.images.float() / 255
    assert abs(values.mean() - MEAN) < 0.005
    assert abs(values.std() - STD) < 0.005
    assert len(data.train.images.flatten(1).unique(dim=0)) == 8000
    assert "Fashion-MNIST" in data.source


def test_the_classes_are_what_they_are_called():
    """Trousers are dark in the middle of their lower half, bags are not; ankle boots are taller than sandals."""
    data = load_dataset("sample").train
    mean = {k: data.images[data.labels == k, 0].float().mean(0) for k in range(10)}
    legs = mean[1][18:28]
    assert legs[:, 13:15].mean() < 0.8 * legs[:, [10, 17]].mean()
    assert (mean[8][18:24, 13:15] > 100).all()
    assert mean[9][:10].mean() > 2 * mean[5][:10].mean()


def test_it_is_small_and_licensed():
    assert sum(path.stat().st_size for path in SHEETS.iterdir()) < 4_000_000
    assert "MIT License" in (SHEETS / "LICENSE").read_text(encoding="utf-8")
    assert Path(vbcaps.data.__file__).parent in SHEETS.parents


def repaint(path: Path) -> None:
    """A whole PNG, of which one pixel is another."""
    with Image.open(path) as sheet:
        sheet.putpixel((9, 9), sheet.getpixel((9, 9)) ^ 1)
        sheet.save(path)


@pytest.mark.parametrize("how", [official.cut, official.page, official.flip, repaint, Path.unlink])
def test_a_damaged_installation(tmp_path, how):
    shutil.copytree(SHEETS, tmp_path / "sheets")
    how(tmp_path / "sheets" / "test.png")
    with pytest.raises(DataError, match=r"test\.png: .*install vbcaps again"):
        sample(tmp_path / "sheets")


def test_make_takes_the_first_of_each_class(tmp_path, monkeypatch):
    """``python -m vbcaps.data.sample`` on a Fashion-MNIST of 60 images, five to be taken of each class."""
    arrays = official.make_idx(tmp_path / "fashion-mnist", n=60)
    monkeypatch.setattr(module, "PER_CLASS", dict.fromkeys(PER_CLASS, 5))
    monkeypatch.setattr(module, "COLUMNS", 10)
    sums = make(load_dataset("fashion-mnist", tmp_path), tmp_path / "made")
    monkeypatch.setattr(module, "SHA256", sums)
    made = sample(tmp_path / "made")
    assert torch.equal(made.train.images, torch.from_numpy(arrays["train"][:50, None]))
    assert made.test.labels.tolist() == list(range(10)) * 5
    assert torch.equal(made.test.images, torch.from_numpy(arrays["t10k"][:50, None]))
