"""DistributedDataParallel: torch's class, reduced by us."""

from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
