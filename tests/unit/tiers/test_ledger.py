"""The ledger: what a directory is charged for."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.filesystem.quota import MAX_GRANT_BYTES, Ledger, grant_bytes, limit_bytes

GIB = 1 << 30


def test_grants_count_as_used_until_they_are_settled() -> None:
    ledger = Ledger(1_000)
    ledger.charge("a", 1, 500)
    assert ledger.charge_bytes == 1_500
    assert ledger.settle("a", 1, 200)
    assert ledger.charge_bytes == 1_200
    assert not ledger.settle("a", 1, 200)
    assert ledger.charge_bytes == 1_200


def test_a_grant_of_a_fenced_writer_is_charged_in_full() -> None:
    ledger = Ledger(0)
    ledger.charge("a", 1, 500)
    ledger.settle("a", 1, None)
    assert ledger.charge_bytes == 500


def test_the_charge_is_unknown_before_the_first_count() -> None:
    ledger = Ledger(None)
    assert ledger.charge_bytes is None
    ledger.begin_count({})
    ledger.add_counted(700)
    ledger.end_count()
    assert ledger.charge_bytes == 700


def test_a_count_deducts_only_what_the_writer_had_reported() -> None:
    ledger = Ledger(0)
    ledger.charge("a", 1, 500)
    ledger.begin_count({("a", 1): 300})
    ledger.add_counted(400)  # 300 reported, 100 more published since
    ledger.end_count()
    assert ledger.charge_bytes == 400 + 200
    ledger.settle("a", 1, 450)
    assert ledger.charge_bytes == 400 + 150


def test_a_file_removed_before_it_is_counted_is_deducted_once() -> None:
    ledger = Ledger(1_000)
    ledger.begin_count({})
    ledger.credit(100, counted=False)
    ledger.add_counted(900)
    ledger.credit(50, counted=True)
    ledger.end_count()
    assert ledger.charge_bytes == 850


def test_the_size_of_a_grant_depends_on_capacity_and_writers() -> None:
    assert grant_bytes(16 * GIB, 1) == grant_bytes(16 * GIB, 2) == GIB
    assert grant_bytes(GIB, 1) == GIB // 16
    assert grant_bytes(GIB, 8) == GIB // 64
    assert grant_bytes(1 << 60, 1) == MAX_GRANT_BYTES
    for writers in range(1, 100):
        assert writers * grant_bytes(GIB, writers) <= GIB // 8


def test_at_most_an_eighth_of_the_capacity_is_set_aside() -> None:
    assert limit_bytes(80_000, 1_000) == 70_000
    assert limit_bytes(GIB, 1) == GIB - 5 * 16_384


class LedgerTestbed:
    """A directory, writers with grants and a count by buckets, in any order of events."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.ledger = Ledger(0)
        self.files: dict[int, int] = {}  # file number -> bucket; each has 10 bytes
        self.next_file = 0
        self.grants: dict[tuple[str, int], int] = {}  # used so far
        self.reports: dict[tuple[str, int], int] = {}
        self.numbers = 0
        self.bucket = -1  # the last bucket counted; -1: no count

    def offer(self) -> None:
        self.numbers += 1
        name = (self.chance.choice("ab"), self.numbers)
        self.grants[name] = 0
        self.ledger.charge(*name, 50)

    def publish(self) -> None:
        usable = [name for name, used in self.grants.items() if used < 50]
        if usable:
            self.grants[self.chance.choice(usable)] += 10
            self.next_file += 1
            self.files[self.next_file] = self.chance.randrange(4)

    def report(self) -> None:
        self.reports.update(self.grants)

    def settle(self) -> None:
        if self.grants:
            name = self.chance.choice(list(self.grants))
            used = self.grants.pop(name)
            self.ledger.settle(*name, used if self.chance.random() < 0.7 else None)

    def evict(self) -> None:
        if self.files:
            bucket = self.files.pop(self.chance.choice(list(self.files)))
            self.ledger.credit(10, counted=0 <= bucket <= self.bucket)

    def vanish(self) -> None:
        """Another process removes a file."""
        if self.files:
            del self.files[self.chance.choice(list(self.files))]

    def count(self) -> None:
        if self.bucket < 0:
            self.ledger.begin_count(dict(self.reports))
        self.bucket += 1
        self.ledger.add_counted(10 * sum(bucket == self.bucket for bucket in self.files.values()))
        if self.bucket == 3:
            self.ledger.end_count()
            self.bucket = -1


@given(st.integers(0, 1 << 32))
def test_the_charge_is_never_below_existing_and_granted_bytes(seed: int) -> None:
    testbed = LedgerTestbed(random.Random(seed))
    steps = [testbed.offer, testbed.publish, testbed.publish, testbed.publish, testbed.report]
    steps += [testbed.settle, testbed.evict, testbed.vanish, testbed.count, testbed.count]
    for _ in range(150):
        testbed.chance.choice(steps)()
        may_come = sum(50 - used for used in testbed.grants.values())
        assert (testbed.ledger.charge_bytes or 0) >= 10 * len(testbed.files) + may_come


def test_a_count_without_writes_makes_the_charge_exact() -> None:
    testbed = LedgerTestbed(random.Random(5))
    for _ in range(200):
        testbed.chance.choice([testbed.offer, testbed.publish, testbed.settle, testbed.vanish])()
    while testbed.grants:
        testbed.settle()
    for _ in range(4):
        testbed.count()
    assert testbed.ledger.charge_bytes == 10 * len(testbed.files)
