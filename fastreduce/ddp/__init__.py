"""DistributedDataParallel: torch's class, reduced by us."""

from .shadow import Shadow
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "Shadow"]
