"""A process that decodes images into a file of pixels: ``python -m vbcaps.data.worker``, which ``stored`` starts.

The first line on its input says which file, where its pixels begin, their form and side; every other line is a job: a
list of image files, and the number of the first. The answer to a job is a line with the errors that it met. Nothing
here needs PyTorch, so a process is ready after a fraction of a second.
"""

import json
import sys
from pathlib import Path
from typing import IO

from vbcaps.data.errors import DataError
from vbcaps.data.opening import Turns
from vbcaps.data.pixels import Form, decode


def work(jobs: IO[str], answers: IO[str]) -> None:
    """Do all jobs."""
    setup = json.loads(jobs.readline())
    form, side, axes = Form(*setup["form"]), setup["side"], setup["axes"]
    with open(setup["file"], "r+b") as file:
        turns = Turns(file)  # every worker has the file open, and large images wait for those of other workers
        for line in jobs:
            job = json.loads(line)
            pixels, errors = [], []
            for path in job["paths"]:
                try:
                    pixels.append(decode(Path(path), side, form, axes, turns).tobytes())
                except DataError as error:
                    errors.append(str(error))
            if not errors:
                file.seek(setup["begin"] + job["first"] * setup["bytes"])
                file.write(b"".join(pixels))
                file.flush()
            answers.write(json.dumps(errors) + "\n")
            answers.flush()


if __name__ == "__main__":
    work(sys.stdin, sys.stdout)
