"""Keys of a Secret: what is valid, and how a change is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError, TierKeyMissingError
from kvtier.tiers.isolation_keys import KeyRing, make_key_set, read_key_set

ONE, TWO = b"1" * 32, b"2" * 64


def mount(directory: Path, version: int, entries: dict[str, bytes]) -> None:
    """Mounts entries as the kubelet does: a new directory, the link swapped, links to the names."""
    directory.mkdir(exist_ok=True)
    content = directory / f"..2026_{version}"
    content.mkdir()
    for name, data in entries.items():
        (content / name).write_bytes(data)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    before = (directory / "..data").resolve() if (directory / "..data").is_symlink() else None
    (directory / "..data_tmp").symlink_to(content.name)
    os.rename(directory / "..data_tmp", directory / "..data")
    for link in directory.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
    if before is not None:
        for path in before.iterdir():
            path.unlink()
        before.rmdir()


def test_one_key_needs_no_current_entry() -> None:
    found = make_key_set({"key": ONE})
    assert found is not None
    assert found.current.id == "key"


def test_white_space_around_the_material_is_not_part_of_it() -> None:
    plain, spaced = make_key_set({"a": ONE}), make_key_set({"a": b" " + ONE + b"\n"})
    assert plain is not None
    assert plain == spaced


def test_keys_of_different_purposes_and_ids_differ() -> None:
    found = make_key_set({"a": ONE, "b": TWO, "current": b"b\n"})
    assert found is not None
    assert found.current.id == "b"
    parts = [part for key in found.by_id.values() for part in (key.tag_key, key.cipher_root)]
    assert len({*parts, ONE}) == 5


def test_material_does_not_appear_in_a_representation() -> None:
    found = make_key_set({"a": ONE})
    assert found is not None
    assert "tag_key" not in repr(found)
    assert repr(found.current.tag_key) not in repr(found)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"a": ONE, "b": TWO}, "must name the one for new objects"),
        ({"a": ONE, "current": b"b"}, "must name a key of the Secret: a"),
        ({"current": b"a"}, "must have 1 to 64 keys"),
        ({"a": b"3" * 31}, "must have 32 to 4096 bytes; it has 31"),
        ({"a": b"3" * 4097}, "must have 32 to 4096 bytes; it has 4097"),
        ({"a" * 33: ONE}, "must be a key id"),
        ({f"k{number}": ONE for number in range(65)}, "must have 1 to 64 keys"),
    ],
)
def test_invalid_secrets_are_rejected_without_their_material(
    entries: dict[str, bytes], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        make_key_set(entries)
    assert "333" not in str(caught.value)
    assert "111" not in str(caught.value)


def test_without_the_secret_there_are_no_keys(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        ring = KeyRing(directory)
        assert not ring.poll()
        assert not ring.available
        with pytest.raises(TierKeyMissingError, match="does not exist, or is empty"):
            ring.keys()


def test_a_swapped_link_changes_the_keys(tmp_path: Path) -> None:
    mounted, changes = tmp_path / "secret", []
    ring = KeyRing(mounted)
    ring.on_change(lambda: changes.append(ring.keys().current.id if ring.available else ""))
    mount(mounted, 1, {"a": ONE})
    assert ring.poll()
    assert not ring.poll()
    mount(mounted, 2, {"a": ONE, "b": TWO, "current": b"a"})
    assert ring.poll()
    mount(mounted, 3, {"a": ONE, "b": TWO, "current": b"b"})
    assert ring.poll()
    mount(mounted, 4, {})
    assert ring.poll()
    assert changes == ["a", "a", "b", ""]
    assert ring.generation == 4
    assert ring.problem


def test_an_invalid_secret_keeps_the_last_valid_keys(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "secret")
    mount(tmp_path / "secret", 1, {"a": ONE})
    assert ring.poll()
    mount(tmp_path / "secret", 2, {"a": ONE, "b": TWO, "current": b"c"})
    assert not ring.poll()
    assert ring.keys().current.id == "a"
    assert "the last valid keys are retained" in ring.problem
    mount(tmp_path / "secret", 3, {"a": ONE, "b": TWO, "current": b"b"})
    assert ring.poll()
    assert ring.problem == ""


def test_an_invalid_secret_at_the_start_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"short")
    ring = KeyRing(tmp_path)
    assert not ring.poll()
    with pytest.raises(TierKeyMissingError, match="32 to 4096 bytes"):
        ring.keys()


def test_commands_read_a_directory_of_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a file for each key"):
        read_key_set(tmp_path)
    (tmp_path / "a").write_bytes(ONE)
    assert read_key_set(tmp_path).current.id == "a"
