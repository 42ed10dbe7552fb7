"""The admission webhook: injects tiers into pods and validates policies. It answers from its caches
and writes nothing.
"""
