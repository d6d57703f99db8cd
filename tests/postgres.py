"""A PostgreSQL server of our own for a test, in a temporary folder, reached through a socket there."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def program(name: str) -> str | None:
    """Return the path of a server program, which distributions keep off the path of commands."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def why_no_server() -> str:
    """Return why there can be no server, else an empty string."""
    if os.name != "posix":
        return "the test starts PostgreSQL's server on Unix only"
    if program("initdb") is None or program("pg_ctl") is None:
        return "PostgreSQL's server is not installed: apt-get install postgresql"
    if os.geteuid() == 0 and (shutil.which("runuser") is None or not has_user("postgres")):
        return "PostgreSQL's server does not run as root, and there is no user postgres"
    return ""


def has_user(name: str) -> bool:
    import pwd

    return any(user.pw_name == name for user in pwd.getpwall())


@contextmanager
def server() -> Iterator[str]:
    """Start a server; yield the URL of its database."""
    with restarting() as (url, _):
        yield url


@contextmanager
def restarting() -> Iterator[tuple[str, Callable[[], None]]]:
    """Start a server; yield the URL of its database, and what stops the server at once and starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # short: the path of a socket has at most 107 letters
    other = os.geteuid() == 0
    if other:
        shutil.chown(folder, "postgres")
    as_user = ["runuser", "-u", "postgres", "--"] if other else []

    def call(name: str, *words: str) -> None:
        command = [*as_user, str(program(name)), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    data = str(folder / "data")
    call("initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8")
    try:
        options = f"-k {folder} -c listen_addresses='' -F"
        call("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            start = ("-D", data, "-m", "immediate", "-w", "-l", str(folder / "log"), "-o", options, "restart")
            yield f"postgresql://postgres@/postgres?host={folder}", lambda: call("pg_ctl", *start)
        finally:
            call("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
