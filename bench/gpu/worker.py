"""`python -m bench.gpu.worker PHASE`: the process in which cases run; their names come over standard input.

It is started by `python -m bench.gpu`, which ends it when a case takes too long, names that case, and starts another
for the rest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from .lines import Lines
from .phases import cases_of
from .worker_cases import Case, work


def main() -> None:
    """Run the cases that were asked for."""
    asked: dict[str, Any] = json.load(sys.stdin)
    known = {case.name: case for case in cases_of(asked["phase"], asked["rehearsal"], Path(asked["out"]))}
    chosen: list[Case] = [known[name] for name in asked["cases"]]
    work(asked["phase"], chosen, Lines(Path(asked["lines"]), asked["common"]), asked["deadline"])


if __name__ == "__main__":
    main()
