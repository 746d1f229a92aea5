"""What moves wires between ranks."""

from .base import Transport, Work
from .local import LocalTransport, local_ranks
from .torch_pg import TorchProcessGroup

__all__ = ["LocalTransport", "TorchProcessGroup", "Transport", "Work", "local_ranks"]
