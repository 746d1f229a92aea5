"""Training steps and collectives over each transport, and between hosts."""
