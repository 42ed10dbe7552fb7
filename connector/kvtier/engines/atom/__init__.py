"""The adapter for ATOM, as an offload connector of its KV transfer interface.

``connector`` has the two classes that ATOM creates, ``plugin`` registers them. The scheduler side
is in ``scheduler``, ``loads`` and ``sequence_state``, the worker side in ``worker`` and ``layout``.
"""
