"""The file system tier."""

from kvtier.tiers.filesystem.tier import FileSystemTier

__all__ = ["FileSystemTier"]
