"""A folder whose files are executed must be one that nobody else can have written to."""

import grp
import os
import pwd
from pathlib import Path

import pytest

from steelyard import private_files as private
from steelyard.errors import BadInput
from steelyard.private_files import make_private, why_not_private

ANOTHER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def test_a_missing_folder_is_created_for_this_user_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    make_private(tmp_path / "new")


@AS_ROOT
def test_another_users_folder_is_refused_in_three_lines(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, ANOTHER, ANOTHER)
    with pytest.raises(BadInput, match=f"belongs to user {ANOTHER}") as refused:
        make_private(folder)
    assert len(str(refused.value).splitlines()) == 3


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BadInput, match="can be written by other users"):
        make_private(folder)


@pytest.mark.parametrize(("mode", "is_private"), [(0o700, True), (0o1777, True), (0o777, False)])
def test_in_a_folder_of_all_users_only_the_sticky_bit_protects(
    mode: int, is_private: bool, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / "own").mkdir(parents=True)
    shared.chmod(mode)
    assert (why_not_private(shared / "own") == "") == is_private


def test_a_link_in_a_folder_of_all_users_is_refused(tmp_path: Path) -> None:
    shared, real = tmp_path / "shared", tmp_path / "real"
    shared.mkdir()
    shared.chmod(0o1777)
    real.mkdir()
    (shared / "link").symlink_to(real)
    assert "is in a folder" in why_not_private(shared / "link")
    (shared / "dangling").symlink_to(tmp_path / "nothing")
    assert "link to nothing" in why_not_private(shared / "dangling")


def test_neither_a_pipe_nor_a_device_is_private(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in why_not_private(tmp_path / "pipe")


def test_the_group_of_one_user_alone_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o770)
    name, number = pwd.getpwuid(os.geteuid()).pw_name, folder.stat().st_gid
    for members, group, is_private in (
        ([], name, True), ([name], name, True), ([name, "eve"], name, False), ([], "staff", False),
    ):  # fmt: skip
        found = grp.struct_group((group, "x", number, members))
        monkeypatch.setattr(private.grp, "getgrgid", lambda _, found=found: found)
        assert (why_not_private(folder) == "") == is_private
