"""Tools run by the command line: the local stack, the demo, benchmarks."""
