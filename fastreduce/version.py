"""The version of fastreduce: one on all ranks, whose messages, wires and bits it stands for."""

__version__ = "0.1.0"
