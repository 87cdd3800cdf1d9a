"""The optimizer state of one parameter, part of which is in offload memory.

Not for transfers: see optimizer_state.py.
"""

from collections.abc import Mapping
from typing import Any

from steelyard.errors import Mismatch
from steelyard.offload.location import OffloadedLayout


class OffloadedState(dict[str, Any]):
    """The state dict of a partly offloaded parameter. Resident entries can be read; reading an
    offloaded one raises Mismatch.
    """

    def __init__(
        self,
        resident: Mapping[str, Any],
        keys: tuple[str, ...],
        layouts: Mapping[str, OffloadedLayout],
    ) -> None:
        super().__init__(resident)
        self.keys_in_order = keys
        self.layouts = dict(layouts)

    def with_resident(self, resident: Mapping[str, Any]) -> "OffloadedState":
        return OffloadedState(resident, self.keys_in_order, self.layouts)

    def without(self, key: str, layout: OffloadedLayout) -> "OffloadedState":
        resident = {k: v for k, v in self.items() if k != key}
        return OffloadedState(resident, self.keys_in_order, {**self.layouts, key: layout})

    def __missing__(self, key: str) -> Any:
        if key not in self.keys_in_order:
            raise KeyError(key)
        raise Mismatch(
            f"{key} of this parameter is in offload memory",
            expected="access between steps through optimizer.state_dict()",
            remedy="call state_dict(), which fetches all state, or plan without offload memory",
        )
