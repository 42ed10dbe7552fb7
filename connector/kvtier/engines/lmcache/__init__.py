"""The CacheEngine path: KVTier's bytes through an LMCache engine in the process of each rank.

For engines that run LMCache already. Only ``bytes_connector`` and ``cache`` import LMCache, and
only where this path is configured.
"""
