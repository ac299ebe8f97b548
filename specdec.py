"""Run the specdec command from a checkout: python specdec.py "Once upon a time"."""

from specdec.cli.bootstrap import main

if __name__ == "__main__":
    main()
