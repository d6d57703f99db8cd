"""``python -m vbcaps``, the command line; torchrun starts it so, too."""

from vbcaps.cli.main import main

main()
