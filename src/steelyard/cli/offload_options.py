"""The options that declare a folder for offloaded tensors.

Not for checking them: see arguments.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steelyard.cli.arguments import offload_memory_of
from steelyard.hardware.cluster import OffloadMemory


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The folder that tensors may be offloaded to."""

    offload_dir: Annotated[
        Path | None,
        Parameter(help="Folder on a disk that tensors may be offloaded to."),
    ] = None
    offload_rate: Annotated[
        str | None, Parameter(help="Its bandwidth in each direction: 500MB/s.")
    ] = None
    offload_size: Annotated[str | None, Parameter(help="Its size limit, such as 20GiB.")] = None

    def memory(self) -> OffloadMemory | None:
        """The offload memory that the options declare, if they do."""
        return offload_memory_of(self.offload_dir, self.offload_rate, self.offload_size)
