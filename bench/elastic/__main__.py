"""`python -m bench.elastic`."""

import typer

from .kills import main

typer.run(main)
