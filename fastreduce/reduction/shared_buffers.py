"""Memory that several buckets, or several streams, use in turn."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

LINE = 64  # bytes
OF_SYSTEM = 1 << 17  # from so many bytes on, memory is asked of the system


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on a CPU begin at a line and take no memory before they are written: not every wire is.

    Malloc would hand out large memory that gradients have been in: it would take that, and hold what does not fit.
    """
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    nbytes = numel * dtype.itemsize
    if nbytes >= OF_SYSTEM:
        return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)
    memory = np.zeros(nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype)  # its storage begins there, too


class Turns:
    """The streams of a GPU that use some memory, one after the other."""

    def __init__(self) -> None:
        self._user: torch.cuda.Stream | None = None

    def use_here(self, device: torch.device) -> None:
        """Before it uses the memory, let a GPU's current stream wait for what was enqueued with it on another one."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self._user is not None and self._user != stream:
                stream.wait_stream(self._user)
            self._user = stream


class SharedBuffers:
    """Memory for wires that buckets use in turn, where each is reduced to its end before the next is begun.

    Attributes:
        turns: of the streams that use it, where there are several.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, torch.device], Tensor] = {}
        self.turns = Turns()

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory called `name` as a tensor; pipelines are made by size, the largest first."""
        nbytes = numel * dtype.itemsize
        made = self._made.get((name, device))
        if made is None or made.numel() < nbytes:
            if made is not None and device.type == "cuda":  # it may have been made on another stream than uses it now
                made.record_stream(torch.cuda.current_stream(device))
            # On a CPU what nobody writes takes no memory: what grows little by little is not to be there in each size.
            least = 0 if made is None or device.type == "cuda" else 2 * made.numel()
            made = self._made[name, device] = zeros(max(nbytes, least), torch.uint8, device)
        return made[:nbytes].view(dtype)
