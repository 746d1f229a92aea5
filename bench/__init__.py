"""The benchmarks: `make bench`, or `python -m bench --quick` for a minute's impression."""
