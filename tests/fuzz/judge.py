"""What a reader may not do, whatever it is given, and the child process in which it is watched."""

import faulthandler
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HANG = 10.0  # seconds of work; of waiting six times as many, since other programs may have the processor
FILES, WRITTEN = 256, 64 << 20  # open files; bytes of a file that is written
# Words that a library says to programmers.
RAW = re.compile(
    r"unpack requires|unpack_from|out of range|subscriptable|has no attribute|codec can't|unhashable|Traceback|"
    r"invalid literal for| object at 0x|NoneType|must be real number|positional arg|keyword argument|could not convert|"
    r"cannot be interpreted|broadcast|cannot reshape|too many values|not enough values|recursion depth|buffer size"
)
SPAWNS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
# Where the audit event has the open folder of its path.
FOLDERS = {
    "os.remove": 1, "os.rename": 2, "os.mkdir": 2, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "os.chmod": 2,
    "os.chown": 3,
}  # fmt: skip
LINKS = ("os.symlink", "os.link")
NAMES_ONLY = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", *LINKS)  # of a link, they change the link itself
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Outcome(NamedTuple):
    refused: bool
    findings: list[str]


class Outside(PermissionError):
    """Raised where something is about to be changed outside of the folder."""


class Watch:
    """Notes, through Python's audit hooks, what a reader does that no reader of data needs to do.

    Nothing is changed outside of the folder: neither by a reader nor by the harness itself, which makes links that lead
    out of it.
    """

    def __init__(self, folder: Path):
        self.folder, self.on, self.seen = os.path.realpath(folder), False, list[str]()
        self.sources = tuple({os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path})
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(args[0], int):
            mode, flags = args[1], args[2]
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and (flags or 0) & WRITING):
                self.outside(event, args[0])
        elif event == "os.truncate":
            self.outside(event, args[0])
        elif event in FOLDERS:
            for at in (0, 1) if event == "os.rename" else (1,) if event in LINKS else (0,):
                self.outside(event, args[at], args[FOLDERS[event] + (at if event == "os.rename" else 0)])
        if not self.on:
            return
        if event in SPAWNS or event.startswith(("socket.", "ftplib.", "urllib.", "smtplib.")):
            self.seen.append(f"{event} {str(args)[:200]}")
        elif event == "pickle.find_class":
            self.seen.append(f"a pickle loads {args[0]}.{args[1]}")
        elif event == "exec":
            file = getattr(args[0], "co_filename", "?")
            if not file.startswith(("<frozen", *self.sources)) and not _importing():
                self.seen.append(f"code is executed: {file}")

    def outside(self, event: str, path: Any, folder: int = -1) -> None:
        """Raise ``Outside`` for a path that leads out of the folder, also by a link.

        Args:
            event: what is about to be done.
            path: what it is done to; a number is a file that is open already.
            folder: the open folder that the path begins in, or -1.
        """
        if isinstance(path, int) or path is None:
            return
        name = os.fsdecode(path)
        if folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        parent = os.path.realpath(os.path.dirname(name) or ".")
        real = os.path.join(parent, os.path.basename(name)) if event in NAMES_ONLY else os.path.realpath(name)
        if not (real + "/").startswith(self.folder + "/") and real not in (
            os.devnull,
            f"/proc/{os.getpid()}/clear_refs",
        ):
            if self.on:
                self.seen.append(f"{event} outside of the folder: {real}")
            raise Outside(f"{event}: {real} is outside of {self.folder}")


def _importing() -> bool:
    """Return whether a module is being imported, which may make code as it likes."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def judged(
    work: Callable[[], object], errors: tuple[type[Exception], ...], names: Iterable[str], watch: Watch, bound: int
) -> Outcome:
    """Call a reader; return whether it refused, and what it did wrong.

    Args:
        work: the call.
        errors: what it may raise.
        names: an error must have one of these names of files.
        watch: notes what the call does.
        bound: bytes that may be resident more than before.
    """
    findings, refused = [], False
    before, began = _resident("VmRSS"), time.process_time()
    watch.seen.clear()
    watch.on = True
    try:
        work()
    except errors as error:
        watch.on, refused = False, True
        findings += _unclear(error, names)
    except MemoryError:
        watch.on = False
        findings.append("memory: MemoryError")
    except Exception as error:
        watch.on = False
        where = traceback.extract_tb(error.__traceback__)[-1]
        findings.append(f"unclear error: {type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})")
    finally:
        watch.on = False
    findings += watch.seen
    if time.process_time() - began > HANG:
        findings.append(f"hang: {time.process_time() - began:.0f} s of work")
    peak = _resident("VmHWM") - before
    if peak > bound:
        findings.append(f"memory: {peak >> 20} MB, the bound is {bound >> 20} MB")
    if peak > bound // 4:
        Path("/proc/self/clear_refs").write_text("5")
    return Outcome(refused, findings)


def _unclear(error: Exception, names: Iterable[str]) -> list[str]:
    said, found = str(error), []
    if not any(name in said for name in names):
        found.append(f"no name of a file: {type(error).__name__}: {said[:300]!r}")
    if RAW.search(said):
        found.append(f"raw words: {type(error).__name__}: {said[:300]!r}")
    if "not enough memory" in said:
        found.append(f"memory: {said[:200]}")
    if any(not (letter.isprintable() or letter in "\n\t") for letter in said):
        found.append(f"control characters: {said[:300]!r}")
    if len(said) > 4000:
        found.append(f"{len(said)} letters: {said[:100]!r}")
    return found


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def in_child(work: Callable[[int], Outcome], seeds: list[int], room: int) -> tuple[int, int, list[tuple[int, str]]]:
    """Do work for every seed in children of this process, which has imported everything.

    A child that crashes or hangs is a finding, and another goes on with the next seed.

    Args:
        work: the work, which is given a seed.
        seeds: the seeds.
        room: bytes of address space that a child may take.

    Returns:
        How many seeds were tried, how many were refused, and what was found: seeds with sentences.
    """
    done, refused, findings = 0, 0, list[tuple[int, str]]()
    while done < len(seeds):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _run(work, seeds[done:], room, writing)
        os.close(writing)
        with os.fdopen(reading) as told:
            for line in told:
                kind, _, rest = line.partition(" ")
                if kind == "done":
                    done, refused = done + 1, refused + int(rest)
                else:
                    findings.append((seeds[done], json.loads(rest)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if done < len(seeds):
            why = f"hang: longer than {6 * HANG:.0f} s" if code == -signal.SIGALRM else f"crash: exit status {code}"
            findings.append((seeds[done], why))
            done += 1
    return done, refused, findings


def _run(work: Callable[[int], Outcome], seeds: list[int], room: int, writing: int) -> None:
    """Be the child: limits, then one seed after another; never return."""
    code = 99
    try:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        warnings.simplefilter("ignore")
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with os.fdopen(writing, "w") as tell:
            for seed in seeds:
                signal.alarm(int(6 * HANG))
                outcome = work(seed)
                for finding in outcome.findings:
                    tell.write(f"found {json.dumps(finding)}\n")
                tell.write(f"done {int(outcome.refused)}\n")
                tell.flush()
        code = 0
    except BaseException:
        os.write(writing, b"found " + json.dumps("the harness: " + traceback.format_exc()[-1500:]).encode() + b"\n")
    finally:
        os._exit(code)
