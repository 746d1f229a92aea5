"""What is noted of a reducer's steps, and who is told: flight records, counters, traces, late and missing ranks."""
