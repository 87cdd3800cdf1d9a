"""Runs ``steelyard`` with a short search and few measurements, for tests that depend on neither.
torchrun ... -m tests.system.dist.hurried plan train.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from steelyard.cli import main
from steelyard.measure.links.background_load import BackgroundLoad
from tests.harness import in_a_hurry

# The hosts still load one another.
_AT_WORK = BackgroundLoad.at_work


def hurried(arguments: list[str]) -> int:
    costs = Path(os.environ["STEELYARD_CACHE"])
    with (
        in_a_hurry(costs),
        mock.patch("steelyard.measure.links.rank_speeds._COMPUTING_SECONDS", 0.2),
        mock.patch.object(BackgroundLoad, "at_work", _AT_WORK),
    ):
        return main(arguments)


if __name__ == "__main__":
    sys.exit(hurried(sys.argv[1:]))
