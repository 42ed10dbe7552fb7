from __future__ import annotations

import pytest
from tests.unit.scheduler.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
