"""Process groups, collectives and launching."""

from .launcher import launcher, spawn

__all__ = ["launcher", "spawn"]
