"""Copies KV between GPU memory and the host pool: byte layout, copy engines, start-up check."""
