"""The list of a directory whose files disappear while it is made."""

from pathlib import Path

import pytest
from tests.support.tier_files import bytes_below, files_below


def test_files_that_disappear_while_they_are_listed_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.kv", "a/2.kv", "b/3.kv", "b/4.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
    (tmp_path / "a" / "link.kv").symlink_to(tmp_path / "b" / "3.kv")
    assert bytes_below(tmp_path) == 40
    assert set(files_below(tmp_path, ".kv")) == {
        tmp_path / "a" / "1.kv",
        tmp_path / "a" / "2.kv",
        tmp_path / "b" / "3.kv",
    }
    lstat = Path.lstat

    def removed(path: Path) -> object:
        (tmp_path / "a" / "2.kv").unlink(missing_ok=True)
        (tmp_path / "b" / "3.kv").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removed)
    assert bytes_below(tmp_path, ".kv") == 10
    assert bytes_below(tmp_path / "gone") == 0
