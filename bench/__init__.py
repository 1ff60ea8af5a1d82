"""Microbenchmarks and end-to-end benchmarks."""
