"""The command line, set-up, checks and benchmarks."""
