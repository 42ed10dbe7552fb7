"""Sizes of KV caches, and from which speed on a tier pays: computed for the documentation."""
