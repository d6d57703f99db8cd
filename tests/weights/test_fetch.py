"""Weights that are not in the package: where they are looked for, and fetching them from a server of our own."""

import hashlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Server

import vbcaps
from vbcaps.cli.main import app
from vbcaps.training.files import RunError
from vbcaps.weights import fetch, find

ROOT = Path(__file__).parents[2]
SMALL = find.FOLDER / "fashion_cnn_laptop.safetensors"
CONTENT = SMALL.read_bytes()
DATA = dict(size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(), dataset="fashion-mnist", test_error=0.1)


@pytest.fixture
def server(monkeypatch):
    """Serves `far`, a network that an empty package has heard of."""
    with Server() as server:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("VBCAPS_WEIGHTS_URL", server.address)
        server.files["/far.safetensors"] = CONTENT
        yield server


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    """A package that lists `far` and has no file, and a cache of its own."""
    here = tmp_path / "site-packages" / "vbcaps" / "weights"
    here.mkdir(parents=True)
    (here / "published.json").write_text(json.dumps({"far": DATA}))
    monkeypatch.setattr(find, "FOLDER", here)
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VBCAPS_WEIGHTS", raising=False)
    return here


@pytest.fixture
def cached(tmp_path):
    return tmp_path / "cache" / "weights" / "far.safetensors"


def test_a_network_is_fetched_once_with_progress(server, cached):
    told = []
    assert vbcaps.list_models() == ["far"]
    assert find.at_hand() == []
    model = vbcaps.load("far", progress=lambda *call: told.append(call))
    assert (model.name, model.file) == ("far", cached)
    assert f"published with vbcaps {vbcaps.__version__}" in model.origin()
    assert told[-1] == ("far.safetensors", len(CONTENT), len(CONTENT))
    assert cached.read_bytes() == CONTENT
    assert [path.name for path in cached.parent.iterdir()] == [cached.name]
    assert find.at_hand() == ["far"]
    vbcaps.load("far")
    assert len(server.requests) == 1


def test_a_download_that_broke_off_goes_on(server, cached):
    server.break_after = 1000
    with pytest.raises(RunError, match=r"the connection ended after 1000 of|IncompleteRead"):
        find.weights_file("far")
    assert not cached.exists()
    server.break_after = None
    assert find.weights_file("far").read_bytes() == CONTENT
    assert server.requests[-1] == ("/far.safetensors", "bytes=1000-")


def test_another_file_is_not_taken_and_a_damaged_one_is_fetched_again(server, cached):
    server.files["/far.safetensors"] = CONTENT[:-1] + b"?"
    with pytest.raises(RunError, match="its SHA-256 differs"):
        find.weights_file("far")
    assert list(cached.parent.iterdir()) == []
    server.files["/far.safetensors"] = CONTENT
    find.weights_file("far")
    cached.write_bytes(CONTENT[:-1] + b"?")
    assert find.present("far") is None
    assert find.weights_file("far").read_bytes() == CONTENT


def test_places_are_searched_in_their_order(package, cached, monkeypatch, tmp_path):
    monkeypatch.setenv("VBCAPS_WEIGHTS_URL", "http://127.0.0.1:9/")
    root = tmp_path / "checkout"
    inside = root / "src" / "vbcaps" / "weights"
    shutil.copytree(package, inside)
    (root / "pyproject.toml").touch()
    monkeypatch.setattr(find, "FOLDER", inside)
    own = tmp_path / "own"
    monkeypatch.setenv("VBCAPS_WEIGHTS", str(own))
    for folder, title in (
        (cached.parent, "cached"), (root / "weights", "in the checkout"), (own, "in VBCAPS_WEIGHTS"),
        (inside, "in the package"),
    ):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "far.safetensors").write_bytes(CONTENT)
        path, place = find.present("far")
        assert (path.parent, place.title) == (folder, title)
        assert find.belongs(path) == place
        assert find.weights_file("far") == path
    assert find.belongs(tmp_path / "far.safetensors") is None


def test_a_damaged_file_in_the_folder_of_the_user_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("VBCAPS_WEIGHTS", str(tmp_path))
    (tmp_path / "far.safetensors").write_bytes(CONTENT[:100])
    with pytest.raises(
        RunError, match=r"far\.safetensors is damaged or another network: its SHA-256 is not that of far"
    ):
        vbcaps.load("far")


def test_without_a_network_the_error_says_what_to_do(cached, monkeypatch):
    monkeypatch.setenv("VBCAPS_WEIGHTS_URL", "http://127.0.0.1:9/mirror")
    with pytest.raises(RunError) as caught:
        vbcaps.load("far")
    for said in (
        "the weights far are not in the package", "http://127.0.0.1:9/mirror/far.safetensors: ", "refused",
        f"put far.safetensors into {cached.parent}", "VBCAPS_WEIGHTS names", "VBCAPS_WEIGHTS_URL",
    ):  # fmt: skip
        assert said in str(caught.value)
    monkeypatch.delenv("VBCAPS_WEIGHTS_URL")
    assert fetch.address() == fetch.ADDRESS


def test_a_cache_that_cannot_be_written_to(server, cached):
    cached.parents[1].write_text("a file where the folder should be")
    with pytest.raises(RunError, match="cannot be written to"):
        find.weights_file("far")


def test_those_that_start_together_fetch_once(server, cached):
    """Threads, which hold the lock as processes do."""
    with ThreadPoolExecutor(3) as several:
        found = list(several.map(lambda _: find.weights_file("far").read_bytes(), range(3)))
    assert found == [CONTENT] * 3
    assert len(server.requests) == 1


def test_the_command_line_lists_fetches_and_finds(server, cached, capsys):
    def run(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            app(list(words), prog_name="vbcaps")
        said = capsys.readouterr()
        assert ended.value.code == code
        return said.out + said.err

    assert "to be fetched" in run("weights", "list")
    assert "the weights far are not here yet: vbcaps weights fetch far" in run("weights", "path", "far", code=1)
    assert "did you mean 'far'" in run("weights", "fetch", "fur", code=1)
    assert "names of networks, or --all" in run("weights", "fetch", code=2)
    assert server.requests == []
    assert str(cached) in run("weights", "fetch", "--all")
    assert run("weights", "path", "far").strip() == str(cached)
    said = run("weights", "list")
    assert "fashion-mnist" in said
    assert "10.00%" in said
    assert "cached" in said
    assert "98%" not in said


def test_the_list_has_the_health_that_is_known(package, capsys):
    facts = DATA | dict(health=dict(most_votes=0.98))
    (package / "published.json").write_text(json.dumps({"far": facts, "cnn": DATA}))
    with pytest.raises(SystemExit):
        app(["weights", "list"], prog_name="vbcaps")
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("far")).endswith("98%")
    assert next(line for line in lines if line.startswith("cnn")).endswith("-")
    assert vbcaps.list_models(details=True)["far"].health == dict(most_votes=0.98)
    assert vbcaps.list_models(details=True)["cnn"].health is None


def test_the_list_is_that_of_the_files_of_this_checkout(monkeypatch):
    """`python tools/published.py` makes it."""
    monkeypatch.undo()
    done = subprocess.run([sys.executable, ROOT / "tools" / "published.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inside = {path.stem for path in find.FOLDER.glob("*.safetensors")}
    assert {"fashion", "fashion_laptop", "vae_mnist"} <= inside < set(vbcaps.list_models())
    assert all(find.is_published(find.present(name)[0]) for name in vbcaps.list_models())


def test_a_release_gets_every_listed_file(monkeypatch, tmp_path):
    monkeypatch.undo()
    command = [sys.executable, ROOT / "tools" / "published.py", "--copy-to", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = json.loads((find.FOLDER / "published.json").read_text())
    assert {path.name: path.stat().st_size for path in (tmp_path / "new").iterdir()} == {
        f"{name}.safetensors": facts["size"] for name, facts in listed.items()
    }
