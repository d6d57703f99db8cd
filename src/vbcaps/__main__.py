"""``python -m vbcaps``, the command line; torchrun starts it so, too."""

from vbcaps.cli import main

main()
