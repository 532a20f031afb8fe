"""Runs the command line from a checkout, without installing: python cli.py plan ..."""

from reshard.cli import main

if __name__ == "__main__":
    main()
