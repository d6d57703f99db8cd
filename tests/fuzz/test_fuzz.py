"""Some thousands of changes of what readers read, every file that once failed, and the judge itself."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked and measured as Linux does it")


def fuzz(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "tools/fuzz.py", *words], capture_output=True, text=True, timeout=300)


def test_what_is_changed_at_random_is_read_or_refused_clearly():
    """Other seeds every day, which the output names."""
    first = int(time.time()) // 86400 * 1000
    done = fuzz("--count", "200", "--seed", str(first))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 findings") > 14


def test_files_that_once_failed():
    done = fuzz("--corpus")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not Path("/tmp/executed").exists()


FAULTS = """
import os, sys, pickle, subprocess, time
sys.path[:0] = [{fuzz!r}, {tests!r}]
from pathlib import Path
import judge
judge.HANG = 0.5
folder = Path({folder!r})
class Run:
    def __reduce__(self): return eval, ("1",)
def write_outside(): open(folder.parent / "outside", "w")
def write_by_a_link():
    os.symlink("..", folder / "up")
    open(folder / "up" / "outside", "w")
def remove_outside(): os.remove(folder.parent / "kept")
def wait(): time.sleep(9)
def work_long():
    end = time.process_time() + 0.8
    while time.process_time() < end: pass
def fill(): return len(bytearray(b"x") * (64 << 20))
def die(): os.kill(os.getpid(), 11)
def clear(): raise ValueError("a.npy: it ends early")
def nameless(): raise ValueError("it ends early")
def raw(): raise ValueError("a.npy: unpack requires a buffer of 4 bytes")
def escape(): raise ValueError("a.npy: \\x1b[2J")
def load(): pickle.loads(pickle.dumps(Run()))
def run(): exec("1")
def start(): subprocess.run(["true"])
def unknown(): {{}}["x"]
def fine(): open(folder / "inside", "w")
faults = work_long, wait, fill, die, nameless, raw, escape, load, run, start, unknown
for work in (fine, clear, write_outside, write_by_a_link, remove_outside, *faults):
    watches = []
    def one(seed):
        watches[:] = watches or [judge.Watch(folder)]
        return judge.judged(work, (ValueError,), ("a.npy",), watches[0], 32 << 20)
    done, refused, findings = judge.in_child(one, [0], 1 << 30)
    print(work.__name__, done, refused, *(what for _, what in findings), sep="|")
"""


def test_the_judge_finds_every_fault(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "kept").touch()
    here = Path(__file__).parent
    code = FAULTS.format(fuzz=str(here), tests=str(here.parent), folder=str(tmp_path / "in"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "kept"]  # it was kept from it, too
    said = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
    assert said.pop("fine") == ["1", "0"]
    assert said.pop("clear") == ["1", "1"]
    expected = dict(
        write_outside="outside of the folder", write_by_a_link="outside of the folder",
        remove_outside="outside of the folder", work_long="hang", wait="hang", fill="memory: 6", die="crash",
        nameless="no name of a file", raw="raw words", escape="control characters", load="a pickle loads",
        run="code is executed", start="subprocess.Popen", unknown="unclear error: KeyError",
    )  # fmt: skip
    assert said.keys() == expected.keys()
    for fault, words in expected.items():
        assert words in "|".join(said[fault][2:]), said[fault]
