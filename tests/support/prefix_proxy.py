"""``PrefixProxy`` of the benchmarks' kit, which tests use too."""

from scripts.bench.kit.prefix_proxy import PrefixProxy

__all__ = ["PrefixProxy"]
