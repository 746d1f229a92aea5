"""`python -m fastreduce.run script.py …`."""

from . import main

main()
