"""Training steps on one host."""
