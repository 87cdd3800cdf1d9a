"""Files and folders that this user alone may write: what is in them is believed, or even run.

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
    """Why another user may have written this file, or what is in this folder, as the end of a
    sentence; empty where nobody else can have, and where there is nothing yet.

    Looks at what a symbolic link points to, and at the folder that the path itself lies in.
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
    # Whoever may replace a file says what is in it; in a sticky folder only its owner may.
    is_sticky = bool(folder.st_mode & stat.S_ISVTX) and not is_link
    if folder.st_uid not in (os.geteuid(), _ROOT) or (_others_may_write(folder) and not is_sticky):
        return "lies in a folder that other users can write to"
    return ""


def make_private(folder: Path) -> None:
    """Make a folder whose files will be run; refuse one that another user may have filled."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = why_not_private(folder)
    except OSError as error:
        reason = f"cannot be made: {error.strerror}"
    if reason:
        raise BadInput(
            f"PyTorch's compile cache {printable(str(folder))} {reason}",
            expected="a folder that only this user can write to: what is in it is run",
            remedy="set TORCHINDUCTOR_CACHE_DIR to a folder of yours, or chmod go-w this one",
        )


def _owned_by_another(found: os.stat_result) -> str:
    own = os.geteuid()
    # A folder of root's that others cannot write to is as good as one's own; a file is not.
    if found.st_uid == own or (stat.S_ISDIR(found.st_mode) and found.st_uid == _ROOT):
        return ""
    return f"belongs to user {found.st_uid}, and this process is of user {own}"


def _others_may_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or by_group)


def _is_own_group(number: int) -> bool:
    """The group that many systems give each user, and that nobody else is in."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and {*group.gr_mem} <= {name}
