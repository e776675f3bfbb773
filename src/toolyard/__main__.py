"""`python -m toolyard`: the command line, where its script is not on PATH."""

from toolyard.cli.main import main

if __name__ == "__main__":
    main()
