"""Faults in training, and who is named."""
