"""Run the command line as `python -m specdec`."""

from specdec.cli.bootstrap import main

main()
