"""A request to end a search early, with the best plan so far.

Not for the signal that makes it: see cli/signals.py.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class StopRequest:
    """A request that another thread or a signal handler may make while a search runs.

    The search sets ``is_possible`` as soon as it knows a plan within the budget. It ends soon after
    ``is_made`` was set.
    """

    is_possible: bool = False
    is_made: bool = False

    @property
    def is_granted(self) -> bool:
        """True if the search has to end, and has a plan to return."""
        return self.is_made and self.is_possible
