"""Benchmarks: machine, roofline, latency, throughput, ops and servers."""
