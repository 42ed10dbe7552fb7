"""Generates what people monitor KVTier with: the list of metrics, alerts and dashboards."""
