"""Benchmarks: ``turnkeeper bench NAME``. Each prints a table, and with ``--json`` one object; none is a test."""
