"""The Python in README.md and docs/, one block after the other, on a CPU; and that links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

from vbcaps import load
from vbcaps.data import load_dataset
from vbcaps.uncertainty import auroc, scores

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
NEEDS = (".cuda()", "fit(", "runs/")  # a GPU, minutes, a run


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_blocks_run_in_their_order(page, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.manual_seed(0)
    names, ran = {"images": torch.randint(0, 256, (4, 30, 40), dtype=torch.uint8)}, 0
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if not any(word in block for word in NEEDS):
            exec(block, names)
            ran += 1
    if page == "README.md":
        assert ran >= 1
        assert names["probabilities"].sum(1).tolist() == pytest.approx([1.0] * 4)
        assert names["mean"].shape == names["variance"].shape == (8, 10, 16)
        assert names["loss"].isfinite()
    else:
        assert ran >= 6
        assert names["frames"].shape == (3, 4, 1, 28, 28)
        assert names["bound"].shape == (8,)
        assert set(names["trace"].layers) == {"conv_caps1", "conv_caps2", "class_caps"}


def test_the_page_of_the_vae_does_what_it_says():
    names = {"images": torch.randint(0, 256, (4, 30, 40), dtype=torch.uint8)}
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/vae.md").read_text(), re.DOTALL)
    exec(block, names)
    shapes = {name: tuple(names[name].shape) for name in ("again", "frames", "sevens", "codes", "answers")}
    image = (1, 28, 28)
    assert shapes == dict(again=(4, *image), frames=(3, *image), sevens=(10, *image), codes=(4, 16), answers=(4, 10))


def test_the_page_of_uncertainty_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = load_dataset("sample")
    test, train = data.test.take(torch.arange(200)), data.train.take(torch.arange(500))
    names = dict(
        images=test.images, labels=test.labels, training_images=train.images, training_labels=train.labels,
        test_images=test.images, strangers=torch.randint(0, 256, (50, 28, 28), dtype=torch.uint8),
    )  # fmt: skip
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/uncertainty.md").read_text(), re.DOTALL)
    exec(block, names)
    assert names["probabilities"].sum(1).tolist() == pytest.approx([1.0] * 200)
    assert names["found"]["density.class_caps.kappa"].shape == (200,)
    elbo = [scores(names["model"], names[some])["elbo"] for some in ("test_images", "strangers")]
    assert auroc(*elbo) > 0.9  # the page's network is one in which the ELBO tells
    assert not load("mine.safetensors").densities["class_caps.kappa"].tied


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
