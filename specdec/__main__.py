"""Run the command line as `python -m specdec`."""

from specdec.cli.entry import main

main()
