"""One disk of a tier of two fails: with I/O errors, by hanging, or because it is full.

The other one must serve what it holds during the fault, take what is computed again, and not wait.
The failed one must serve again afterwards. Both lie on the storage under test, the failing one
behind a FUSE mount or, without FUSE, wrapped in the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.testbed import KEYS, FaultTestbed, Measurements
from kvtier.scorecard.tier_faults import TierWrapper

MEANS = "FUSE, one of two volumes"
WRAPPED_MEANS = "fault wrapper, one of two volumes"
FAILING, WORKING = "disk0", "disk1"
SUSPEND_SECONDS = 20.0
"""How long it may take until a volume is suspended, or serves again."""
STORED_SECONDS = 5.0
CHECKED = 6
"""Objects that are loaded from the other volume, and stored on it, during a fault."""


@dataclass(frozen=True, slots=True)
class VolumesContext:
    """A testbed whose tier has two volumes, of which ``mount`` makes one fail. ``means``: how."""

    testbed: FaultTestbed
    mount: FaultyMount | TierWrapper
    means: str

    def state(self, volume: str) -> str:
        """The state of a volume, from the daemon's status."""
        for tier in self.testbed.tierd.status().get("tiers", []):
            for each in tier["volumes"]:
                if (tier["name"], each["name"]) == ("disk", volume):
                    return str(each["state"])
        return ""


VolumeFault = Callable[[VolumesContext, float, Measurements], None]


@contextmanager
def testbed(home: Path, place: Path | None, fuse: bool) -> Iterator[VolumesContext]:
    """Starts a daemon with two volumes below ``place``, or ``home``, where the rest is. ``fuse``:
    the failing one is behind a FUSE mount, if one can be made."""
    below = (home if place is None else place / home.name) / "below"
    for name in (FAILING, WORKING):
        (below / name).mkdir(parents=True)
    mounted = home / FAILING
    mounted.mkdir(parents=True)
    with ExitStack() as stack:
        control, found = home / "faults.json", None
        if fuse:
            with suppress(OSError):
                found = FaultyMount(below / FAILING, mounted, control, home / "mount.log")
        mount = found or TierWrapper(control, only=FAILING)
        stack.callback(mount.close)
        failing = below / FAILING if found is None else mounted
        wrapped = control if found is None else None
        bed = FaultTestbed(home, failing, below, wrapped, volumes=(failing, below / WORKING))
        stack.callback(bed.close)
        yield VolumesContext(bed, mount, MEANS if wrapped is None else WRAPPED_MEANS)


def _by_mount(opens: bool, **faults: dict[str, Any]) -> VolumeFault:
    """A fault of one volume. ``opens``: it must suspend that volume."""

    def run(context: VolumesContext, seconds: float, measurements: Measurements) -> None:
        bed = context.testbed
        context.mount.set(**faults)
        try:
            bed.stream(seconds, measurements)
            if opens and not _reaches(context, FAILING, "BreakerOpen", measurements):
                _note(measurements, f"{FAILING} is not suspended")
            if context.state(WORKING) != "Healthy":
                _note(measurements, f"{WORKING} is {context.state(WORKING)}")
            _check_loads(bed, measurements)
            _check_stores(bed, measurements)
        finally:
            context.mount.set()
        if not _reaches(context, FAILING, "Healthy", measurements):
            _note(measurements, f"{FAILING} does not serve again")

    return run


def _note(measurements: Measurements, text: str) -> None:
    measurements.crashes += 1
    measurements.notes.append(text)


def _reaches(context: VolumesContext, volume: str, state: str, measurements: Measurements) -> bool:
    """Whether the volume has that state within ``SUSPEND_SECONDS``, while loads go on."""
    end = time.monotonic() + SUSPEND_SECONDS * context.testbed.patience
    while context.state(volume) != state:
        if time.monotonic() > end:
            return False
        context.testbed.stream(0.5, measurements)
    return True


def _check_loads(bed: FaultTestbed, measurements: Measurements) -> None:
    """The working volume serves what it holds. What the other one holds is hidden, or fails."""
    bed.engine.step()
    held = [number for number in range(KEYS) if bed.in_file(number) and not bed.in_ram(number)]
    served = 0
    for number in held:
        served += bed.engine.load([number], bed.budget_seconds)
        if served >= CHECKED:
            return
    if served < min(CHECKED, len(held)) and len(held) >= CHECKED:
        _note(measurements, f"{served} of {len(held)} objects in files were served")


def _check_stores(bed: FaultTestbed, measurements: Measurements) -> None:
    """New objects reach the working volume, whichever they would belong to."""
    stored = 0
    first = 100 * KEYS
    for number in range(first, first + 2 * CHECKED):
        bed.wait(lambda: bed.engine.can_store, "a free slot", 2 * bed.patience)
        if bed.store(number, 2 * bed.patience) and bed.engine.wait_for(
            lambda n=number: bed.in_file(n), STORED_SECONDS * bed.patience
        ):
            stored += 1
    # The first object that finds its volume full is dropped.
    if stored < 2 * CHECKED - 2:
        _note(measurements, f"{stored} of {2 * CHECKED} new objects reached a file")


VOLUME_FAULTS: dict[str, VolumeFault] = {
    "one-disk-EIO": _by_mount(True, read={"errno": "EIO"}, write={"errno": "EIO"}),
    "one-disk-hangs": _by_mount(True, every={"hang": True}),
    "one-disk-full": _by_mount(
        False, create={"errno": "ENOSPC"}, write={"errno": "ENOSPC"}, mkdir={"errno": "ENOSPC"}
    ),
}
