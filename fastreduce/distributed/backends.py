"""Which communication backends there are, and the reason why one cannot run here."""

from __future__ import annotations

from ..errors import SettingError
from ..transports.nccl.library import unavailable, why_no_nccl

NAMES = ("nccl", "gloo", "mpi")


def parse(backend: str | None) -> dict[str, str]:
    """`"gloo"`, `"cpu:gloo,cuda:nccl"` → device type (or "" for any) → backend.

    None means NCCL where it can run, else gloo.

    Raises:
        SettingError: if there is no such backend.
    """
    if backend is None:
        return {"": "gloo" if why_no_nccl() else "nccl"}
    found = {}
    for part in str(backend).lower().split(","):
        device, _, name = part.rpartition(":")
        if name not in NAMES:
            raise SettingError(
                f"init_process_group: unknown backend {backend!r}; allowed: {', '.join(NAMES)}, "
                "and by device, as in 'cpu:gloo,cuda:nccl'"
            )
        found[device] = name
    return found


def check_available(names: set[str]) -> None:
    """Check that NCCL is here, if it is asked for; MPI is checked where it starts.

    Raises:
        BackendUnavailableError: with "NCCL library not available", the reason, and what to install.
    """
    reason = why_no_nccl() if "nccl" in names else None
    if reason is not None:
        raise unavailable(f"{reason}. Or use backend='gloo', which needs no GPU")
