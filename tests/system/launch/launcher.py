"""A launcher in a process of its own, for a test that kills it: ``python launcher.py FOLDER``."""

import sys
from pathlib import Path

from steelyard.run.launch.launcher import launch

ONE = Path(__file__).with_name("one.py")


def main(folder: Path) -> None:
    command = [sys.executable, str(ONE), str(folder), "go on", "60"]
    launch(command, num_ranks=2, logs=folder / "logs", timeout_seconds=60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
