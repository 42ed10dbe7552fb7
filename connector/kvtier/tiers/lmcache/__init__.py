"""The lmcache tier. Importing this package does not import LMCache: only its child process does."""

from kvtier.tiers.lmcache.tier import LMCacheTier

__all__ = ["LMCacheTier"]
