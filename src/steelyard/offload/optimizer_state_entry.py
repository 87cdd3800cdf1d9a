"""What an optimizer keeps for a parameter, where some of it lies in offload memory.

Not for moving it: see optimizer_state.py.
"""

from collections.abc import Mapping
from typing import Any

from steelyard.errors import Mismatch
from steelyard.offload.location import OffloadedLayout


class OffloadedState(dict[str, Any]):
    """The state of a parameter of which some lies far; what is near can be read."""

    def __init__(
        self, near: Mapping[str, Any], keys: tuple[str, ...], layouts: Mapping[str, OffloadedLayout]
    ) -> None:
        super().__init__(near)
        self.keys_in_order = keys
        self.layouts = dict(layouts)

    def with_near(self, near: Mapping[str, Any]) -> "OffloadedState":
        return OffloadedState(near, self.keys_in_order, self.layouts)

    def without(self, key: str, layout: OffloadedLayout) -> "OffloadedState":
        near = {k: v for k, v in self.items() if k != key}
        return OffloadedState(near, self.keys_in_order, {**self.layouts, key: layout})

    def __missing__(self, key: str) -> Any:
        if key not in self.keys_in_order:
            raise KeyError(key)
        raise Mismatch(
            f"{key} of this parameter lies in offload memory",
            expected="to be read between steps through optimizer.state_dict()",
            remedy="call state_dict(), which brings all of it home, or plan without offload memory",
        )
