"""The fault scorecard: a real tier daemon under storage and process faults, judged by KVTier's
promises.
"""
