"""The interface over which a host speaks to the others.

Gloo takes the one that the host's own name stands for, and on many machines that is the loopback,
where nobody else comes. Whoever sets GLOO_SOCKET_IFNAME knows better. Not for meeting: see join.py.
"""

from collections.abc import MutableMapping

from torch.distributed import Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.exchange.interfaces import address_towards, interface_of
from steelyard.run.ranks.who import Who

_VARIABLE = "GLOO_SOCKET_IFNAME"


def speak_between_hosts(store: Store, who: Who, environ: MutableMapping[str, str]) -> None:
    """The others look towards the first host, and the ranks of that one towards the second: its own
    name may stand for its loopback."""
    of_a_host = who.size // who.hosts
    if who.rank >= of_a_host:
        towards = who.address
        if who.rank == of_a_host:
            store.set("second host", address_towards(towards))
    else:
        towards = store.get("second host").decode()
    name = interface_of(address_towards(towards))
    if name:
        environ.setdefault(_VARIABLE, name)
