"""Benchmarks. Run as modules from the repository: ``python -m perf.forward --help``."""
