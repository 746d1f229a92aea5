"""`fastreduce launch --elastic`: ranks that end one by one, and start again one by one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import ClassVar

from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from .elastic_nodes import ElasticNodes
from .torchs_launcher import Ranks, fate_of, is_group, say, traceback_of

LEFT_SECONDS = 1.0  # for what a rank has left running


class EachForItself(Ranks):
    """Ranks of an elastic training: when one fails, the others go on, and it starts again.

    So often as `restarts` says, for all of this machine together; on one machine, one that has started again stays away
    when it fails and those that have not have ended well. Those that have failed for good are left out; the job has
    succeeded where one rank on this machine has.
    """

    restarts: ClassVar[int] = 0

    def _start(self) -> None:
        super()._start()
        self._first_pids = super().pids()
        self._left, self._times = self.restarts, dict.fromkeys(self._first_pids, 0)
        self._succeeded, self._over = set[int](), frozenset()

    def pids(self) -> dict[int, int]:
        """Those of the first processes: torch's agent takes others for an error."""
        return self._first_pids

    def _poll(self) -> RunProcsResult | None:
        if self.nodes is not None:
            self.nodes.check()
        for local_rank in sorted(self._running_local_ranks):
            process = self.subprocess_handlers[local_rank].proc
            code = process.poll()
            if code == 0:
                self._succeeded.add(local_rank)
            if code is not None and (code == 0 or not self._start_again(local_rank, process.pid, code)):
                self._running_local_ranks.discard(local_rank)
        if self._running_local_ranks:
            return None
        if not self._succeeded:
            self._running_local_ranks = set(self._first_pids)  # torch sees that they have failed
            return super()._poll()
        if isinstance(self.nodes, ElasticNodes):
            self.nodes.note_done()
        self.close()
        values = dict.fromkeys(self._first_pids)
        return RunProcsResult(return_values=values, stdouts=self.stdouts, stderrs=self.stderrs)

    def _start_again(self, local_rank: int, pid: int, code: int) -> bool:
        """Whether it does."""
        env = self.envs[local_rank]
        failure = ProcessFailure(local_rank, pid, code, env["TORCHELASTIC_ERROR_FILE"])
        # Once started again it found them gone, or else: whatever it does, they are not there to take it in.
        all_again = all(self._times[each] > 0 for each in self._running_local_ranks)
        over = bool(self._succeeded) and all_again and self.nodes is None
        again = self._left > 0 and not over
        if again:
            outcome = f"the others go on, and it starts again, {self._left - 1} restart(s) left"
        elif self._left > 0:
            outcome = "the others have ended well, and it stays away"
        else:
            outcome = "the others go on, and it stays away (--max-restarts)"
        say(f"rank {env['RANK']} {fate_of(failure)}; {outcome}\n{traceback_of(failure)}".rstrip())
        _end_group(pid)
        if not again:
            self._over |= {local_rank}
            return False
        with suppress(FileNotFoundError):
            os.unlink(env["TORCHELASTIC_ERROR_FILE"])
        self._left -= 1
        self._times[local_rank] += 1
        files = [
            path if path in ("", os.devnull) else f"{path}.{self._times[local_rank]}"
            for path in (self.stdouts[local_rank], self.stderrs[local_rank])
        ]
        self.subprocess_handlers[local_rank] = get_subprocess_handler(
            entrypoint=str(self.entrypoint),
            args=self.args[local_rank],
            env=env,
            stdout=files[0],
            stderr=files[1],
            local_rank_id=local_rank,
            numa_options=self._numa_options,
        )
        return True


def _end_group(number: int) -> None:
    """End what a rank has left running, a moment later: multiprocessing's tracker gives back what was shared."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGTERM)
        deadline = time.monotonic() + LEFT_SECONDS
        while is_group(number) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(number, signal.SIGKILL)
