from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
