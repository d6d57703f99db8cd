"""The explorer's server: who may ask, what is refused, and that it goes on after everything that it refuses."""

import http.client
import io
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.explore.answers import Explorer
from vbcaps.explore.networks import FIRST, Networks
from vbcaps.explore.pictures import MOST_BYTES

uvicorn = pytest.importorskip("uvicorn", reason="the server's tests need the extra: pip install 'vbcaps[explore]'")

from vbcaps.explore import limits  # noqa: E402
from vbcaps.explore.server import MOST_JSON, listen, server_of  # noqa: E402

JSON = {"content-type": "application/json"}


@contextmanager
def serving(explorer):
    """Serve in a thread; yield the port."""
    with listen(None) as one:
        server = server_of(explorer)
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[one]), daemon=True)
        thread.start()
        yield one.getsockname()[1]
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def port():
    with serving(Explorer(Networks())) as port:
        yield port


def ask(port, path, body=None, headers=JSON, method=None, host=None):
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    every = dict(headers) if body is not None else {}
    if host is not None:
        every["host"] = host
    connection.request(method or ("GET" if body is None else "POST"), path, body, every)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def look(port, **changes):
    sent = dict(model=FIRST, image=dict(sample=3), changes=changes)
    return ask(port, "/api/look", json.dumps(sent))


def test_the_page_and_its_files_are_served_from_the_package(port):
    status, headers, content = ask(port, "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert b"<script" in content
    assert b"http://" not in content
    assert b"https://" not in content
    assert "script-src 'self'" in headers["content-security-policy"]
    for name in ("nothing.js", "..%2fserver.py", "../server.py", "%2e%2e%2fanswers.py", "index.html%00"):
        assert ask(port, f"/static/{name}")[0] == 404


def test_an_answer_comes_through_whole(port):
    status, _, content = look(port, rotate=30)
    assert status == 200
    found = json.loads(content)
    assert sum(found["answer"]["probabilities"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1:80@evil", "127.0.0.1:8a", "10.0.0.7", "", "127.0.0.1.evil.example"],
)
def test_other_names_of_the_host_are_refused(port, host):
    assert ask(port, "/api/catalogue", host=host)[0] == 403


def test_pages_of_other_sites_are_refused(port):
    body = json.dumps(dict(model=FIRST, image=dict(sample=3)))
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", "https://localhost", "http://["):
        assert ask(port, "/api/look", body, JSON | {"origin": origin})[0] == 403
    assert ask(port, "/api/look", body, JSON | {"origin": f"http://127.0.0.1:{port}"})[0] == 200
    status, _, content = ask(port, "/api/look", body, {"content-type": "text/plain"})  # what a form could send
    assert status == 415
    assert "application/json" in json.loads(content)["error"]


@pytest.mark.parametrize("body", ["", "{", "[1]", "null", "[" * 100_000, '{"model": 1e999}', '{"model": "\\ud800"}'])
def test_what_is_no_request_is_refused_in_words(port, body):
    status, _, content = ask(port, "/api/look", body)
    assert status in (400, 404)
    assert json.loads(content)["error"]
    assert look(port)[0] == 200


def test_bodies_are_limited(port):
    big = json.dumps(dict(model=FIRST, image=dict(pixels="A" * MOST_JSON)))
    assert ask(port, "/api/look", big)[0] == 413
    try:
        status, _, content = ask(port, f"/api/upload?model={FIRST}", bytes(MOST_BYTES + 2**20))
        assert status == 413
        assert "8 MB" in json.loads(content)["error"]
    except (BrokenPipeError, ConnectionResetError):  # it stopped reading
        pass
    assert look(port)[0] == 200


def test_an_upload_comes_back_as_pixels_that_can_be_looked_at(port):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 60, 3), dtype=np.uint8)).save(file, "PNG")
    status, _, content = ask(port, f"/api/upload?model={FIRST}", file.getvalue())
    assert status == 200
    sent = dict(model=FIRST, image=dict(pixels=json.loads(content)["pixels"]))
    found = json.loads(ask(port, "/api/look", json.dumps(sent))[2])
    want = vbcaps.load(FIRST).predict(Image.open(file))[0]
    np.testing.assert_allclose(found["answer"]["probabilities"], want, rtol=1e-4, atol=1e-6)


def test_a_bad_upload_is_refused_in_words(port):
    for content in (b"", b"no picture"):
        status, _, said = ask(port, f"/api/upload?model={FIRST}", content)
        assert status == 400
        assert json.loads(said)["error"]
    assert ask(port, "/api/upload?model=../../secret", b"")[0] == 404
    assert ask(port, "/api/upload", b"")[0] == 404
    assert look(port)[0] == 200


def test_twenty_pages_at_once_get_their_own_answers(port):
    angles = range(0, 100, 5)
    alone = {angle: json.loads(look(port, rotate=angle)[2]) for angle in angles}
    found = {}
    threads = [
        threading.Thread(target=lambda a=a: found.update({a: json.loads(look(port, rotate=a)[2])})) for a in angles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for angle in angles:
        assert found[angle] | dict(milliseconds=0) == alone[angle] | dict(milliseconds=0)


def test_other_methods_and_paths_are_refused(port):
    assert ask(port, "/api/look")[0] == 405
    assert ask(port, "/etc/passwd")[0] == 404


def test_it_listens_on_loopback_alone():
    with listen(None) as one:
        assert one.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ValueError, match=r"port \d+ cannot be used .*--port"):
            listen(one.getsockname()[1])


# --- the command -----------------------------------------------------------------------------------------------------


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explore", *map(str, words)], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def test_a_network_that_is_not_there_ends_the_command():
    code, said = run("fashoin", "--no-open")
    assert code == 1
    assert "fashion" in said


def test_the_command_serves_and_opens_the_page(monkeypatch):
    from vbcaps.explore import server

    opened, served = threading.Event(), []
    monkeypatch.setattr(server.webbrowser, "open", lambda address: opened.set())
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda self, sockets: served.append(sockets) or opened.wait(10))
    code, said = run()
    assert code == 0, said
    assert "http://127.0.0.1:" in said
    assert served
    assert opened.is_set()


@pytest.fixture
def hurried(monkeypatch):
    """A server that waits for a second, and for twenty connections."""
    monkeypatch.setattr(limits, "PATIENCE", 1.0)
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 20)
    with serving(Explorer(Networks())) as port:
        yield port


def live(connections):
    """Return how many connections the server has not ended."""
    found = 0
    for one in connections:
        one.settimeout(0.01)
        try:
            while one.recv(4096):
                pass
        except TimeoutError:
            found += 1
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    "head",
    [
        b"", b"POST /api/upload?mo",
        b"POST /api/upload?model=x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7000000\r\n\r\n" + bytes(100_000),
        b"POST /api/look HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /half",
    ],
    ids=["nothing", "half a head", "half an upload", "half of JSON", "half a second head"],
)  # fmt: skip
def test_half_open_requests_end_in_time_and_others_are_served(hurried, head):
    held = []
    for _ in range(60):
        held.append(socket.create_connection(("127.0.0.1", hurried)))
        with suppress(OSError):
            held[-1].sendall(head)
    time.sleep(0.3)
    assert live(held) <= 20
    time.sleep(4.0)  # of uploads four wait at a time for their bodies, and the others for a slot
    assert live(held) == 0
    assert ask(hurried, "/api/catalogue")[0] == 200
    for one in held:
        one.close()


def test_uploads_wait_for_each_other_and_do_not_fill_the_memory(port):
    content = bytes(7_000_000)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(lambda _: ask(port, f"/api/upload?model={FIRST}", content, {})[0], range(60)))
    assert set(answers) <= {400, 503}
    assert answers.count(400) > 30
    assert resident("VmHWM") - before < 150e6


def resident(field):
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024
