"""`python -m cairn`: the command line where the command itself is not installed."""

from cairn.cli.main import main

if __name__ == "__main__":
    main()
