"""Workspace and cost key of a body that runs slice by slice.

Not for the body itself: see ../graph.py.
"""

from steelyard.ir.graph import PRODUCTS, Body


def body_workspace_bytes(body: Body) -> int:
    """Return the peak bytes of one slice's intermediates, without kernel workspace."""
    count, nodes = body.calls[-1]
    sums = {given.name for given in body.gives if given.along is None}
    columns = {given.name for given in body.gives if given.along == -1}
    outside = {take.tensor.storage for take in body.takes}
    read = {i for node in nodes for i in node.inputs}
    sizes: dict[int, int] = {}
    last: dict[int, int] = {}
    storages_of: dict[str, set[int]] = {}
    for index, node in enumerate(nodes):
        storages_of[node.name] = {t.storage for t in node.outputs} - outside
        # The kernel of a product that is only summed accumulates in place. The kernel of a
        # product that is only a column slice of the result writes straight into that result.
        is_added = node.name in sums - read and node.op in PRODUCTS
        is_placed = node.name in columns - read and node.op in PRODUCTS
        for tensor in () if is_added or is_placed else node.outputs:
            full = tensor.nbytes if node.name in sums else -(-tensor.nbytes // body.rows)
            nbytes = full if node.name in sums else full * count
            if tensor.storage in storages_of[node.name]:
                sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), nbytes)
        for name in (node.name, *node.inputs):
            last.update(dict.fromkeys(storages_of.get(name, ()), index))
    for name in {given.name for given in body.gives} - columns:
        last.update(dict.fromkeys(storages_of[name], len(nodes) - 1))
    live = most = 0
    born: set[int] = set()
    for index, node in enumerate(nodes):
        for storage in storages_of[node.name] - born:
            live += sizes.get(storage, 0)
        born |= storages_of[node.name]
        most = max(most, live)
        live -= sum(sizes.get(s, 0) for s, end in last.items() if end == index)
    # Half-precision sums are accumulated in float32.
    return most + sum(
        given.tensor.numel * 4
        for given in body.gives
        if given.along is None and given.tensor.dtype in ("float16", "bfloat16")
    )


def body_cost_key(body: Body) -> str:
    """Return a text of every property that determines the cost of the body."""
    named: dict[str, int] = {}

    def number(name: str) -> int:
        return named.setdefault(name, len(named))

    lines = [f"{body.rows} rows in {body.parts}{f' of {body.each}' if body.each else ''}"]
    lines += [
        f"{number(s.name)} {s.along} {s.dims} {s.unit} {s.tensor.dtype} {s.tensor.shape} "
        f"{s.tensor.stride} {s.tensor.pending}"
        for s in (*body.takes, *body.gives)
    ]
    lines += [
        f"{number(node.name)} {node.op} {[number(i) for i in node.inputs]} {node.signature}"
        for node in body.calls[0][1]
    ]
    return "\n".join(lines)
