"""`python -m cairn`: the command line, without the installed script."""

from cairn.cli.main import main

if __name__ == "__main__":
    main()
