"""The server of the explorer: requests in, answers out, on this machine alone.

A page names networks and samples; it cannot name files, and nothing that it sends is kept or executed. Answers are
computed in threads, so that a slow one does not keep other pages from being served.
"""

import contextlib
import json
import re
import socket
import threading
import webbrowser
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from vbcaps.explore.answers import Explorer
from vbcaps.explore.networks import framed, shown_side
from vbcaps.explore.pictures import MOST_BYTES, Refused, as_png, read_upload
from vbcaps.training.files import RunError
from vbcaps.weights.inputs import PICTURES, side_of

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from vbcaps.explore.limits import Connection, Slots, in_time
except ImportError as missing:
    raise RunError(f"the explorer needs {missing.name}: pip install 'vbcaps[explore]'") from missing

HOST = "127.0.0.1"
HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # by which a browser may call the server
MOST_JSON = 2**18  # bytes of a request that is no upload
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def app_of(explorer: Explorer) -> ASGIApp:
    """Return the application that answers the page's requests."""
    slots = Slots()

    async def page(request: Request) -> Response:
        return await static_file("index.html")

    async def static(request: Request) -> Response:
        return await static_file(request.path_params["name"])

    async def catalogue(request: Request) -> Response:
        return await answered(explorer.catalogue)

    async def model(request: Request) -> Response:
        return await answered(explorer.about, request.query_params.get("name"))

    async def upload(request: Request) -> Response:
        async with slots.take():
            content = await body(request, MOST_BYTES)
            return await answered(uploaded, explorer, request.query_params.get("model"), content)

    def from_json(answer: Callable[[Any], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            return await answered(answer, read_json(request, await body(request, MOST_JSON)))

        return respond

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/api/catalogue", catalogue),
        Route("/api/model", model),
        Route("/api/upload", upload, methods=["POST"]),
        Route("/api/look", from_json(explorer.look), methods=["POST"]),
        Route("/api/routing", from_json(explorer.routing), methods=["POST"]),
        Route("/api/sweep", from_json(explorer.sweep), methods=["POST"]),
        Route("/api/decode", from_json(explorer.decode), methods=["POST"]),
    ]
    handlers: Any = {Refused: refused, ClientDisconnect: refused}
    return Guard(Starlette(routes=routes, exception_handlers=handlers))


class Guard:
    """Let through only what comes from this machine's own page, and set the headers that keep the page to itself.

    A page of another site may reach a server on loopback, by a form or by a name that resolves to it. Such requests
    have another Host or Origin, and are refused.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        known = HOSTS.fullmatch(host) is not None
        own = origin in (None, f"http://{host}")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        if known and own:
            await self.app(scope, receive, with_headers)
        else:
            await error_response("the explorer answers only its own page", 403)(scope, receive, with_headers)


async def static_file(name: str) -> Response:
    """Return one of the page's files; they are in one folder, so a name has no slash."""
    folder = resources.files("vbcaps.explore").joinpath("static")
    known = {file.name for file in folder.iterdir()}
    if name not in known:
        return error_response(f"there is no file {name!r}", 404)
    kind = KINDS.get(name[name.rfind(".") :], "application/octet-stream")
    return Response(folder.joinpath(name).read_bytes(), media_type=kind)


async def body(request: Request, most: int) -> bytes:
    """Return the body of a request, and stop reading when it is too large."""
    content = bytearray()
    async with in_time():
        async for part in request.stream():
            content += part
            if len(content) > most:
                raise Refused(f"the request is too large: {most / 2**20:g} MB are the most the explorer takes", 413)
    return bytes(content)


def read_json(request: Request, content: bytes) -> dict[str, Any]:
    """Return the object in a request. A form of another site could send text, but not this content type."""
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise Refused("the content type must be application/json", 415)
    try:
        sent = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused("the request is no JSON") from error
    if not isinstance(sent, dict):
        raise Refused("the request must be an object")
    return sent


async def answered(answer: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    return JSONResponse(await run_in_threadpool(answer, *arguments))


def uploaded(explorer: Explorer, name: str | None, content: bytes) -> dict[str, Any]:
    """Return an uploaded picture in the size and channels of a network; the page keeps it, the server does not."""
    model = explorer.networks.model(name)
    channels = model.net.in_channels
    image = framed(read_upload(content, side_of(model.recipe), channels), shown_side(model))
    note = "" if channels in PICTURES else "This network has two cameras: both see the picture, in grey."
    return dict(pixels=as_png(image[0]), note=note)


def refused(request: Request, error: Exception) -> Response:
    """Return the reason why a request cannot be answered."""
    return error_response(str(error), getattr(error, "status", 400))


def error_response(message: str, status: int) -> Response:
    return JSONResponse(dict(error=message), status)


def listen(port: int | None) -> socket.socket:
    """Return a socket on loopback: on ``port``, or where none is named on 7860 or any that is free."""
    for wanted in [7860, 0] if port is None else [port]:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, wanted))
            one.listen(128)  # whoever calls before the server runs waits
            return one
        except OSError as error:
            one.close()
            last = error
    raise ValueError(f"port {port} cannot be used ({last.strerror}): name another with --port, or none")


def server_of(explorer: Explorer) -> uvicorn.Server:
    """Return the server of the page, which bounds what its clients may hold."""
    return uvicorn.Server(
        uvicorn.Config(app_of(explorer), http=Connection, ws="none", log_level="warning", access_log=False)
    )


def serve(explorer: Explorer, port: int | None, ready: Callable[[str], None], open_page: bool) -> None:
    """Serve the page until Ctrl-C.

    Args:
        explorer: who answers.
        port: the port, or None for one that is free.
        ready: is called with the page's address before it is served.
        open_page: open the address in the user's browser.
    """
    with listen(port) as one:
        address = f"http://{HOST}:{one.getsockname()[1]}/"
        server = server_of(explorer)
        ready(address)
        if open_page:
            threading.Timer(0.5, webbrowser.open, [address]).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[one])
