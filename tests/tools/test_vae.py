"""The measurements of a Capsule-VAE: linear readouts, and rows that are kept."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from vbcaps.data import Split

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import vae as tool


def split(count):
    index = torch.arange(count)
    info = torch.stack([index % 5, index % 9, 2 * (index % 18), index % 6], 1)
    return Split(torch.zeros(count, 2, 20, 20, dtype=torch.uint8), index % 5, info)


def test_a_readout_that_is_linear_is_found_whole_and_noise_is_not():
    torch.manual_seed(0)
    there = split(900)
    y = tool.viewpoint(there)
    assert y.shape == (900, 9)
    torch.testing.assert_close(y[:, 0].square() + y[:, 1].square(), torch.ones(900).double())
    mixing = torch.randn(9, 16).double()
    x = y @ mixing + there.labels[:, None]
    half = torch.arange(900) < 450
    parts = (x[half], y[half], there.labels[half], x[~half], y[~half], there.labels[~half])
    assert tool.r_squared(*parts) == pytest.approx(dict(azimuth=1, elevation=1, light=1))
    noise = torch.randn(900, 16).double()
    found = tool.r_squared(noise[half], *parts[1:3], noise[~half], *parts[4:])
    assert max(found.values()) < 0.05
    only = x * 0 + y[:, 2:3]  # the elevation alone
    found = tool.r_squared(only[half], *parts[1:3], only[~half], *parts[4:])
    assert found["elevation"] == pytest.approx(1, abs=1e-3)
    assert found["light"] < 0.5


@pytest.mark.parametrize("words", [("vae_mnist", "fashion_cnn_laptop"), ("vae_fashion", "smallnorb")])
def test_a_readout_needs_networks_of_smallnorb(words, capsys):
    with pytest.raises(SystemExit, match=rf"of smallNORB, whose images have a viewpoint; {words[0]} is of"):
        tool.main(["readout", words[0], "--cnn", words[1]])


def test_rows_are_added_under_one_heading(tmp_path):
    for k in range(2):
        tool.append(tmp_path / "a.csv", dict(one=k, two=2 * k))
    with open(tmp_path / "a.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [dict(one="0", two="0"), dict(one="1", two="2")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["samples", "vae_mnist"], "samples needs --reader"),
        (["readout", "vae_smallnorb"], "readout needs --cnn"),
        (["entries"], "entries needs WEIGHTS, the Capsule-VAE"),
    ],
)
def test_what_is_missing_is_named(words, message, capsys):
    with pytest.raises(SystemExit):
        tool.main(words)
    assert message in capsys.readouterr().err
