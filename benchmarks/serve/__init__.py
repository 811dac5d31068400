"""Latency and goodput of HTTP servers under a load of random arrivals: `python -m benchmarks.serve --help`."""
