"""Lookups across processes: which chunks all ranks of a host have stored, asked by the scheduler.

For engines whose ranks own the storage, so that neither the scheduler's process nor a tierd can
look into it. ``client`` and ``server`` speak ``wire`` over ZeroMQ; ``index`` decides.
"""
