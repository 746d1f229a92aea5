"""Kernels by themselves: time, instructions, what formats lose."""
