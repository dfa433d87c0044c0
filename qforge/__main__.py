"""`python -m qforge` is the `qforge` command."""

from qforge.cli.main import main

main()
