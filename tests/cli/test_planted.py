"""Code in the working folder and beside images is never executed, whatever command runs there."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
NAMES = (
    "PIL.py", "numpy.py", "json.py", "torch/__init__.py", "tifffile.py", "matplotlib.py", "optuna.py",
    "sitecustomize.py", "usercustomize.py", "vbcaps/__init__.py", "vbcaps/data/worker.py", "git", "c++",
)  # fmt: skip
EXECUTED = "open({!r}, 'a').write(__file__ + '\\n')\n"
# One process runs every command, since PyTorch takes seconds to import; each process that it starts is a fresh one.
# The page of the explorer, which would be served, and what fetches from elsewhere are left out.
EVERY = """
import os, sys
from vbcaps.cli import main
from vbcaps.data import stored
started = []
def hook(event, args):
    if event == "subprocess.Popen":
        started.append(" ".join(map(os.fsdecode, args[1])))
sys.addaudithook(hook)
main.app, app = (lambda **_: None), main.app
main.main()  # which sets the environment
tiny = "--arch 4,2,2,2 --iters 1 --batch 4 --warmup 0 --rotate 0 --quiet".split()
own = ["train", "--data", ".", "--image-size", "22", "--crop", "20", "--epochs", "1", "--validation", "0", *tiny]
weights = ["--weights", "run/last.safetensors"]
for limit, words in (
    (0, [*own, "--out", "run"]),
    (1 << 30, "eval run/last.safetensors".split()),
    (0, "eval run/last.safetensors --data .".split()),
    (1 << 30, ["predict", "train/dark/0.png", *weights]),
    (1 << 30, ["routing", "train/dark/0.png", "--model", "run/last.safetensors", "-o", "routing.png"]),
    (1 << 30, "uncertainty run/last.safetensors".split()),
    (1 << 30, "export run/last.safetensors -o net.pt2".split()),
    (1 << 30, ["figures", "priors", "--results", sys.argv[1], "--out", "figures"]),
    (1 << 30, "recipes smallnorb".split()),
    (1 << 30, "data list".split()),
    (1 << 30, "weights list".split()),
    (1 << 30, "weights path fashion_laptop".split()),
    (1 << 30, "sample --weights vae_fashion --out sample.png".split()),
    (1 << 30, "reconstruct train/dark/0.png --weights vae_fashion --out again.png".split()),
    (1 << 30, "tweak train/dark/0.png --weights vae_fashion --out tweaked.png".split()),
    (1 << 30, ["sweep", "default", "--field", "lr=choice:0.01,0.02", "--field", "data=.", "--out", "swept",
               "--trials", "1", "--method", "random", "--field", "image-size=22", "--field", "crop=20",
               "--field", "epochs=1", "--field", "arch=4,2,2,2", "--field", "batch=4", "--field", "warmup=0"]),
):
    stored.IN_MEMORY = limit
    begun = len(started)
    try:
        code = app(words, standalone_mode=False)
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    print("ran", words[0], code, len(started) - begun, sep="|")
for line in started:
    print("started", line, sep="|")
"""


def plant(folder: Path, marker: Path) -> None:
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shell = f"#!/bin/sh\necho $0 >> {marker}\n"
        path.write_text(EXECUTED.format(str(marker)) if path.suffix else shell)
        path.chmod(0o755)
    (folder / "matplotlibrc").write_text("text.usetex: True\n")


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of images with code beside them, which is noted where it runs."""
    folder, marker = tmp_path / "photos", tmp_path / "executed"
    for k, name in enumerate(("train/dark", "train/light", "test/dark", "test/light")):
        (folder / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng(i).integers(60 * k, 60 * k + 60, (24, 26, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
        plant(folder / name, marker)
    plant(folder, marker)
    return folder, marker


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}
    kept |= dict(VBCAPS_CACHE=str(folder.parent / "cache"), COLUMNS="1000", **more)
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=500)


def test_no_command_runs_code_of_the_working_folder(planted):
    folder, marker = planted
    done = run([sys.executable, "-P", "-c", EVERY, str(ROOT / "results")], folder)
    lines = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("ran|", "started|"))]
    assert done.returncode == 0, done.stderr
    assert not marker.exists(), marker.read_text()
    failed = [line for line in lines if line[0] == "ran" and line[2] not in ("None", "0")]
    assert not failed, done.stdout + done.stderr
    processes = [line[1] for line in lines if line[0] == "started"]
    workers = [one for one in processes if "vbcaps.data.worker" in one]
    assert workers
    assert all(one.split()[1] == "-P" for one in workers)
    assert not [one for one in processes if "latex" in one or "dvi" in one], processes


def test_workers_do_not_look_where_this_process_does(planted):
    """``python -c`` and a notebook have the working folder among the places of modules."""
    folder, marker = planted
    code = (
        "import json, os, sys, tifffile, torch, PIL.Image, vbcaps.data.folder as folder, vbcaps.data.stored as stored;"
        "stored.IN_MEMORY = 0; sys.path[:0] = ['', os.getcwd()]; folder.image_folder(stored.Path('.'), 20)"
    )
    done = run([sys.executable, "-P", "-c", code], folder)
    assert done.returncode == 0, done.stderr
    assert list((folder.parent / "cache").glob("*/*.npy"))
    assert not marker.exists(), marker.read_text()


def test_python_m_vbcaps_forgets_the_working_folder(planted):
    """A ``vbcaps`` there would be the program itself; everything else is imported later."""
    folder, marker = planted
    shutil.rmtree(folder / "vbcaps")
    done = run([sys.executable, "-m", "vbcaps", "predict", "train/dark/0.png", "--weights", "fashion_laptop"], folder)
    assert done.returncode == 0, done.stderr
    assert not marker.exists(), marker.read_text()


def test_every_python_of_ours_starts_without_the_working_folder():
    """A list that begins with ``sys.executable`` goes on with ``-P``, or with a script, beside which Python looks."""
    wrong = []
    for path in sorted(path for folder in ("src", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                second = node.elts[1]
                if isinstance(second, ast.Constant) and second.value != "-P" and str(second.value).startswith("-"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for path in sorted((ROOT / "scripts").iterdir()):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "python" in line and (" -m " in line or " -c " in line) and " -P " not in line and line[0] != "#":
                wrong.append(f"{path.relative_to(ROOT)}:{number}")
    assert not wrong


def test_the_library_never_forks():
    """A fork while another thread computes waits forever; a program that is started anew does not."""
    forks = {"os.fork", "os.forkpty", "pty.fork", "ProcessPoolExecutor"}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in forks, path
                assert not [one.arg for one in node.keywords if one.arg in ("preexec_fn", "num_workers")], path
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "multiprocessing" not in ast.unparse(node), path
