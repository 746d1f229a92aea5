"""`python -m fastreduce`: the command line in this interpreter, whatever else is first on PATH."""

from .cli import main

if __name__ == "__main__":  # and not in a process that it spawns
    main()
