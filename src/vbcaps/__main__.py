"""``python -m vbcaps``, the command line; torchrun starts it so, too."""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # of a working folder that was removed
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # where `-m` looks first: a PIL.py beside images is not the library

from vbcaps.cli.main import main

main()
