"""Networks on the Hugging Face Hub, which is a server on this computer that keeps what it is sent."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest
import torch

import vbcaps
from vbcaps.training.files import RunError
from vbcaps.uncertainty import fit_densities
from vbcaps.weights.model import Model

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model() -> Model:
    return vbcaps.load("fashion_laptop")


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_saved_folder_gives_the_same_bits(model, images, tmp_path):
    expected, kept = model.predict(images), dict(model.about)
    assert model.save_pretrained(tmp_path / "net") == tmp_path / "net"
    assert sorted(path.name for path in (tmp_path / "net").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    again = Model.from_pretrained(tmp_path / "net")
    assert torch.equal(again.predict(images), expected)
    assert (again.recipe, again.classes, again.view, again.about) == (model.recipe, model.classes, model.view, kept)
    assert again.densities.keys() == model.densities.keys() != set()
    assert not again.training
    assert torch.equal(vbcaps.load(tmp_path / "net" / "model.safetensors").predict(images), expected)


def test_the_card_says_what_the_network_is(model, tmp_path):
    from huggingface_hub import ModelCard

    model.save_pretrained(tmp_path / "net")
    card = ModelCard.load(tmp_path / "net" / "README.md")
    assert (card.data.library_name, card.data.license, card.data.pipeline_tag) == (
        "vbcaps", "apache-2.0", "image-classification",
    )  # fmt: skip
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type) == ("Fashion-MNIST", "accuracy")
    assert result.metric_value == pytest.approx(1 - model.about["test_error"])
    text = card.text
    for words in (
        f"{100 * model.about['test_error']:.2f}% of the test images of Fashion-MNIST",
        f"over a temperature of {model.temperature:g}",
        'Model.from_pretrained("net")', "## Intended use", "## Limits", "desousaribeiro2020capsule",
        "## Licence\n\nApache-2.0", "Ankle boot", "VB routing in 2 iterations",
    ):  # fmt: skip
        assert words in text, words


def test_a_network_of_ones_own_tells_no_folder_and_needs_its_own_licence(model, tmp_path):
    model.recipe = replace(model.recipe, data="/home/somebody/wards/scans")
    model.about["began_with"] = dict(weights="C:\\Users\\somebody\\old.safetensors", sum="1")
    model.about["temperature"] = 1.0
    model.file = None
    model.save_pretrained(tmp_path / "net")
    for path in (tmp_path / "net").iterdir():
        assert b"somebody" not in path.read_bytes(), path.name
    card = (tmp_path / "net" / "README.md").read_text()
    assert "of the test images of scans" in card
    assert "named none" in card
    assert "license:" not in card
    assert "No temperature was fitted" in card
    again = Model.from_pretrained(tmp_path / "net")
    assert again.recipe.data == "scans"
    assert again.about["began_with"]["weights"] == "old.safetensors"
    model.save_pretrained(tmp_path / "licensed", license="cc-by-4.0")
    assert "license: cc-by-4.0" in (tmp_path / "licensed" / "README.md").read_text()


def test_facts_of_other_weights_are_not_published(model, tmp_path):
    fit_densities(model, torch.zeros(20, 28, 28, dtype=torch.uint8), torch.arange(20) % 10)
    with torch.no_grad():
        next(model.net.parameters()).add_(1.0)
    model.save_pretrained(tmp_path)
    again, card = Model.from_pretrained(tmp_path), (tmp_path / "README.md").read_text()
    assert again.about == {}
    assert again.densities == {}
    assert "was not tested" in card
    assert "model-index" not in card


def test_a_card_that_is_there_stays(model, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_nothing_pickled_is_read(model, tmp_path):
    """huggingface_hub's own mixin falls back to ``pytorch_model.bin``."""
    torch.save(model.net.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"has no model\.safetensors"):
        Model.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    with pytest.raises(RunError, match="no safetensors file"):
        Model.from_pretrained(tmp_path)


def test_wrong_names_and_options(tmp_path):
    with pytest.raises(ValueError, match="'a/b/c' is neither a folder nor the name of a repository, USER/NAME"):
        Model.from_pretrained("a/b/c")
    with pytest.raises(TypeError, match="no argument 'revison'; it takes device, revision"):
        Model.from_pretrained("a/b", revison="main")


# --- a server --------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """The calls of the Hub that a push and a download make."""

    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, *_):
        pass

    def answer(self, content: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlparse(self.path).path
        self.asked.append(f"POST {path}")
        host = f"http://{self.headers['Host']}"
        if path == "/api/repos/create":
            self.reply(dict(url=f"{host}/me/net", name="me/net", id="me/net"))
        elif path == "/api/validate-yaml":
            self.reply(dict(errors=[], warnings=[]))
        elif path.startswith("/api/models/me/net/preupload/"):
            names = [one["path"] for one in json.loads(body)["files"]]
            self.reply(dict(files=[dict(path=name, uploadMode="regular", shouldIgnore=False) for name in names]))
        elif path.startswith("/api/models/me/net/commit/"):
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    self.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            self.reply(dict(commitUrl=f"{host}/me/net/commit/{COMMIT}", commitOid=COMMIT, success=True))
        else:
            self.answer(b"", 404)

    def reply(self, fields: dict) -> None:
        self.answer(json.dumps(fields).encode(), Content_Type="application/json")

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.asked.append(f"{self.command} {path}")
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/me/net/resolve/") and name in self.files:
            content = self.files[name]
            self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(b"", 404, X_Error_Code="EntryNotFound" if "/me/net/" in path else "RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub():
    """A Hub on this computer, and the environment in which huggingface_hub talks to it."""
    handler = type("Handler", (Hub,), dict(files={}, asked=[]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_what_is_pushed_is_what_is_pulled(hub, tmp_path):
    """A process of its own, because huggingface_hub reads the address of the Hub when it is imported."""
    handler, address = hub
    code = """
import torch, vbcaps
from vbcaps import Model
model = vbcaps.load("fashion_laptop")
print(model.push_to_hub("me/net", private=True, token="hf_none"))
again = Model.from_pretrained("me/net", token="hf_none")
images = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8)
print(torch.equal(again.predict(images), model.predict(images)), again.about == model.about)
for name in ("me/other", "you/net"):
    try:
        Model.from_pretrained(name, token="hf_none")
    except Exception as error:
        print(type(error).__name__, error)
"""
    environment = os.environ | dict(
        HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"/me/net/commit/{COMMIT}")
    assert lines[1] == "True True"
    assert lines[2].startswith("RunError me/other: ")
    assert lines[3].startswith("RunError you/net: ")
    assert sorted(handler.files) == ["README.md", "config.json", "model.safetensors"]
    assert 'Model.from_pretrained("me/net")' in handler.files["README.md"].decode()
    assert json.loads(handler.files["config.json"])["recipe"]["name"] == "fashion_laptop"
    assert not [call for call in handler.asked if call.endswith((".bin", ".pt", ".pkl"))]


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"\xff", b"[]", b"3"], ids=["cut", "deep", "byte", "list", "3"])
def test_a_damaged_configuration_is_refused_by_name(tmp_path, text):
    vbcaps.load("fashion_laptop").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(RunError, match=r"cannot read .*config\.json: "):
        vbcaps.Model.from_pretrained(tmp_path)
