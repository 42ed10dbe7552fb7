"""The admission webhook: attaches tiers to pods and validates policies. It answers from its caches
and writes nothing.
"""
