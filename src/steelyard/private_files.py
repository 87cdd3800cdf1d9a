"""Checks for files that only this user may write, because their content is trusted or executed.

Not for files that anybody may have written, which are read within bounds: see safe_files.py.
"""

import grp
import os
import pwd
import stat
from pathlib import Path

from steelyard.errors import BadInput
from steelyard.safe_text import printable

_ROOT = 0


def why_not_private(path: Path) -> str:
    """Return the reason why a path is not private, as the end of a sentence; empty if it is.

    A path is private if no other user can have written the file, or the content of the folder, or
    if it does not exist. If it is a symbolic link, its target is checked; the folder that contains
    the path is checked too.
    """
    try:
        found = path.stat()
        is_link = path.is_symlink()
        folder = path.parent.stat()
    except FileNotFoundError:
        return "is a symbolic link to nothing" if path.is_symlink() else ""
    if reason := _owned_by_another(found):
        return reason
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        return "is neither a file nor a folder"
    if _others_may_write(found):
        return "can be written by other users"
    # A user who may replace a file controls its content; in a sticky folder only the owner may.
    is_sticky = bool(folder.st_mode & stat.S_ISVTX) and not is_link
    if folder.st_uid not in (os.geteuid(), _ROOT) or (_others_may_write(folder) and not is_sticky):
        return "is in a folder that other users can write to"
    return ""


def make_private(folder: Path) -> None:
    """Make a folder for executable files; raise BadInput if another user can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = why_not_private(folder)
    except OSError as error:
        reason = f"cannot be created: {error.strerror}"
    if reason:
        raise BadInput(
            f"PyTorch's compile cache {printable(str(folder))} {reason}",
            expected="a folder that only this user can write to, because code in it is executed",
            remedy="set TORCHINDUCTOR_CACHE_DIR to a folder of yours, or chmod go-w this one",
        )


def _owned_by_another(found: os.stat_result) -> str:
    own = os.geteuid()
    # A folder of root that others cannot write to is as safe as one of our own; a file of root is
    # not.
    if found.st_uid == own or (stat.S_ISDIR(found.st_mode) and found.st_uid == _ROOT):
        return ""
    return f"belongs to user {found.st_uid}, and this process is of user {own}"


def _others_may_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or by_group)


def _is_own_group(number: int) -> bool:
    """True for the group that many systems create for each user, without other members."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and {*group.gr_mem} <= {name}
