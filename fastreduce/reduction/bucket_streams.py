"""BucketStreams: what the buckets of each device are reduced on, and who waits for it on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .streams import CudaStream, Stream, is_capturing


class BucketStreams:
    """The stream of each device's buckets, and the CUDA streams of those who bring gradients.

    Attributes:
        by_device: what a device's buckets are reduced on; changed in place.
    """

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Stream] = {}
        self._numbers: set[int] = set()  # of GPUs that have buckets
        self._callers: set[torch.cuda.Stream] = set()  # that know less than the one on which averages are stored

    def make(self, devices: Iterable[torch.device], make_stream: Callable[[torch.device], Stream]) -> None:
        """Reduce buckets of these devices from now on, on streams that are made here."""
        self.join()
        of_devices = sorted(devices, key=str)
        self._numbers = {device.index for device in of_devices if device.type == "cuda"}
        self.by_device.clear()
        self.by_device.update((device, make_stream(device)) for device in of_devices)

    @property
    def gpus(self) -> list[torch.device]:
        """The devices that are GPUs."""
        return [device for device in self.by_device if device.type == "cuda"]

    def note_caller(self) -> None:
        """Gradients come on the current GPU's current stream, of whose memory they may be: it waits in `join`, too."""
        if self._numbers and torch.cuda.current_device() in self._numbers:
            self._callers.add(torch.cuda.current_stream())

    def join(self) -> None:
        """Let callers' streams wait for what is on buckets' streams, also that of a backward that raised.

        Behind it memory may be let go of, or used otherwise, that such a bucket's work still reads or writes.
        """
        for stream in self.by_device.values():
            if isinstance(stream, CudaStream):
                stream.join()
        while self._callers:
            caller = self._callers.pop()
            current = torch.cuda.current_stream(caller.device)
            if caller != current and not is_capturing():  # a graph's end would find a stream that nobody waits for
                caller.wait_stream(current)

    def synchronize(self) -> None:
        """Wait until GPUs have ended what they do, on whatever stream."""
        for device in self.gpus:
            torch.cuda.synchronize(device)
