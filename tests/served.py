"""A server on this machine, for what is fetched."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves ``files`` by their address; ``ranges`` says whether it can go on in the middle."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.break_after: int | None = None
        self.length: str | None = None  # what it says instead of the length; "": nothing
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                outer.requests.append((self.path, asked))
                data = outer.files.get(self.path)
                if data is None:
                    self.send_error(404)
                    return
                start = int(asked[len("bytes=") : -1]) if asked and outer.ranges else 0
                if start >= len(data) > 0 and start:
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if outer.length != "":
                    self.send_header("Content-Length", outer.length or str(len(data) - start))
                self.end_headers()
                end = None if outer.break_after is None else start + outer.break_after
                with suppress(ConnectionError):  # of a client that has had enough
                    self.wfile.write(data[start:end])

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()
