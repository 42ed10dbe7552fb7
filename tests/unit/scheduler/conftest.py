from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_testbed import SchedulerTestbed


@pytest.fixture
def testbed() -> SchedulerTestbed:
    return SchedulerTestbed()
