"""The supported versions of torch: an older one is refused, a newer one gets one line of warning.

This module does not import torch. Not for the differences between versions: see
_torch/private_names.py.
"""

import logging
import os
import re
from collections.abc import Mapping
from functools import cache

from steelyard.errors import BadInput
from steelyard.safe_text import printable

OLDEST = (2, 11)
# docs/torch-versions.md describes how a newer version is tested; after that, this number is raised.
NEWEST_TESTED = (2, 14)


INSTALL = f'pip install "torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}"'


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def minor_version(version: str) -> tuple[int, int]:
    """Return (2, 14) for ``2.14.1+cpu``, and also for a nightly build such as
    ``2.14.0.dev20260901``.
    """
    found = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", version)
    if found is None:
        raise BadInput(
            f"torch has the version {printable(version[:40])!r}, which cannot be read",
            expected=f"a version such as {dotted(NEWEST_TESTED)}.0",
            remedy=INSTALL,
        )
    return int(found[1]), int(found[2])


def check(version: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a torch older than any tested one; warn once if it is newer than all of them.

    If there are several ranks, only rank 0 warns.
    """
    found = minor_version(version)
    if found < OLDEST:
        raise BadInput(
            f"torch {printable(version[:40])} is too old",
            expected=f"torch {dotted(OLDEST)} or newer",
            remedy=INSTALL,
        )
    if found > NEWEST_TESTED and environ.get("RANK", "0") == "0":
        _warn(version)


@cache
def _warn(version: str) -> None:
    logging.getLogger("steelyard").warning(
        "steelyard: torch %s is newer than torch %s, the newest version that was tested",
        printable(version[:40]),
        dotted(NEWEST_TESTED),
    )
