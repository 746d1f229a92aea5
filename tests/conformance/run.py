"""Runs torch's DDP tests against torch's class and ours: `python -m tests.conformance.run [test …]`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0


@dataclass
class Result:
    test: str
    which: str
    outcome: str
    message: str
    seconds: float


class Server:
    """The process that forks ranks (`tests.conformance.ranks`), and dies with this object's context."""

    def __init__(self, world_size: int = 2) -> None:
        environment = {**os.environ, "BACKEND": "gloo", "WORLD_SIZE": str(world_size), "TEMP_DIR": "/nonexistent"}
        environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        environment.update(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        environment.pop("FASTREDUCE_COMPRESSION", None)
        environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            self.tests: list[str] = self._read(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, test: str, which: str, timeout: float = 60.0) -> Result:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"test": test, "which": which, "timeout": timeout}) + "\n")
        return Result(**self._read(timeout + 30))

    def _read(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the server of the conformance tests {'ended' if ready else 'did not answer'}")
        return json.loads(line)

    def close(self) -> None:
        """End the server and its ranks."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    with Server() as server:
        names = sys.argv[1:] or server.tests
        print(len(names), "tests", flush=True)
        for name in names:
            for which in os.environ.get("WHICH", "torch,fastreduce").split(","):
                r = server.run(name, which, float(os.environ.get("TIMEOUT", "60")))
                print(f"{r.outcome:8s} {which:10s} {r.seconds:6.1f} {name}", flush=True)
                if r.outcome == "failed":
                    print(r.message[-int(os.environ.get("TAIL", "1500")):], flush=True)


if __name__ == "__main__":
    main()
