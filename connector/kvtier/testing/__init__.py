"""What authors of tiers and of connectors test with: the conformance suite, faults, stand-ins."""

import sys

_pytest = sys.modules.get("pytest")
if _pytest is not None:
    # Before it is imported, so that what fails in it says with which values.
    _pytest.register_assert_rewrite("kvtier.testing.conformance")
