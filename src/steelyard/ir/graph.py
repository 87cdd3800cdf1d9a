"""One training step as a data-flow graph in plain data: nodes, storages and outputs.

capture/ builds it, trades rewrite it and predict/ reads it. It contains no torch objects: an
operator is represented by its name, a tensor by its shape, strides, dtype and storage.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

from steelyard.ir.collective import Collective


class Role(StrEnum):
    """The role of a storage; all roles but ``activation`` are resident for the whole step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    CONSTANT = "constant"
    TANGENT = "tangent"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    ACTIVATION = "activation"


class Phase(StrEnum):
    """The part of the step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a node: its shape and strides, and its storage.

    ``pending`` names a lazy operation of torch (conj, neg) that the reader must resolve; most
    kernels make a copy first.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int
    offset: int = 0
    pending: str = ""

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * item_bytes(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another node's value."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that names a torch object: ``torch.float32``, ``torch.device('cpu')``."""

    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An argument that names a mesh axis; the runner substitutes the process group of that axis."""

    name: str


Argument = Ref | Symbol | Axis | str | int | float | complex | bool | None | tuple["Argument", ...]


def without_refs(argument: Argument) -> Argument:
    """Return the argument with each tensor reference replaced by ``$``."""
    if isinstance(argument, Ref):
        return "$"
    if isinstance(argument, tuple):
        return tuple(without_refs(a) for a in argument)
    return argument


OFFLOAD_CALLS = "steelyard.offload_"
# A matrix product that streams one operand from offload memory, slice by slice.
FETCH_MATMUL = "steelyard.fetch_matmul"
# A matrix product that streams its result to offload memory, slice by slice.
MATMUL_SEND = "steelyard.matmul_send"
# These concatenate tensors for one joint collective, and extract one of them from its result.
PACK_ROWS, UNPACK_ROWS = "steelyard.pack_rows", "steelyard.unpack_rows"
_COPIES = ("aten.clone.default", "aten._unsafe_view.default")
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call, or one input of the step (``op == "input"``).

    ``path`` is the module, ``line`` the user's source line. ``nth`` counts the calls of ``op`` in
    ``path`` within the forward pass, so that (path, op, nth) names a forward node across traces. A
    multi-output operator is one node; ``getitem`` nodes extract its results. ``signature`` keys
    measured costs: op, shapes, strides, dtypes and plain arguments. A node with a ``body`` runs
    that body and returns its results as a tuple. ``flops`` are those of matrix products, which
    multiply in the format ``multiplies_in`` (empty: the dtype of the result). An ``is_uncounted``
    operator may multiply but has no FLOP formula. A node with a ``collective`` only issues it. The
    result may only be read by the node that ``waits_for`` it. Tensors that the backend needs until
    then are also inputs of the waiting node.
    """

    name: str
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    phase: Phase = Phase.FORWARD
    path: str = ""
    line: str = ""
    nth: int = 0
    signature: str = ""
    flops: int = 0
    multiplies_in: str = ""
    is_uncounted: bool = False
    moved_bytes: int = 0
    is_view: bool = False
    is_random: bool = False
    mutates: tuple[str, ...] = ()
    collective: Collective | None = None
    waits_for: str = ""
    body: "Body | None" = None

    @property
    def is_input(self) -> bool:
        return self.op == "input"

    @property
    def product_format(self) -> str:
        """The format name under which a device declares the peak rate of these products."""
        return self.multiplies_in or (self.outputs[0].dtype if self.outputs else "float32")

    @property
    def is_transfer(self) -> bool:
        """True if the node copies a value to or from offload memory; the cost is that of the
        link.
        """
        return self.op.startswith(OFFLOAD_CALLS)

    @property
    def is_packing(self) -> bool:
        """True if the node packs or unpacks the tensors of one joint collective."""
        return self.op in (PACK_ROWS, UNPACK_ROWS)

    @property
    def is_fetch_matmul(self) -> bool:
        return self.op == FETCH_MATMUL

    @property
    def is_slicing(self) -> bool:
        """True if the node starts a sliced fetch; the node that uses the slices issues their later
        fetches.
        """
        return self.op in (f"{OFFLOAD_CALLS}begin", f"{OFFLOAD_CALLS}begin_weight")

    @property
    def is_getitem(self) -> bool:
        return self.op == "getitem"

    @property
    def is_free(self) -> bool:
        """True if the node neither computes nor allocates: inputs, views, getitem."""
        return self.is_view or self.op in ("input", "getitem")

    def reading(self, renamed: Mapping[str, str]) -> "Node":
        """Return the same call with its input names replaced."""

        def substituted(argument: Argument) -> Argument:
            match argument:
                case Ref(name):
                    return Ref(renamed.get(name, name))
                case tuple():
                    return tuple(substituted(a) for a in argument)
            return argument

        return replace(
            self,
            args=tuple(substituted(a) for a in self.args),
            kwargs=tuple((key, substituted(a)) for key, a in self.kwargs),
            inputs=tuple(dict.fromkeys(renamed.get(i, i) for i in self.inputs)),
            mutates=tuple(renamed.get(m, m) for m in self.mutates),
            waits_for=renamed.get(self.waits_for, self.waits_for),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedValue:
    """A value that a body consumes or produces, in slices or whole.

    ``along`` says which dims are sliced: the leading ones (0) or the last one (-1). None means that
    the value is whole; a whole result is a sum over the slices. The ``dims`` leading dims are
    flattened to one, in which a row is ``unit`` elements.
    """

    name: str
    tensor: Tensor
    along: int | None
    dims: int = 1
    unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Calls that run once per slice of ``rows``; no intermediate is ever materialized whole.

    ``calls`` contains the calls for each slice size that occurs. Slices have sizes as equal as
    possible. If ``each`` is set, every slice but the last has that many rows.
    """

    rows: int
    parts: int
    each: int = 0
    takes: tuple[SlicedValue, ...]
    calls: tuple[tuple[int, tuple[Node, ...]], ...]
    gives: tuple[SlicedValue, ...]

    def counts(self) -> tuple[int, ...]:
        """Return the rows of each slice, larger slices first."""
        if self.each:
            full, rest = divmod(self.rows, self.each)
            return (self.each,) * full + ((rest,) if rest else ())
        least, more = divmod(self.rows, self.parts)
        return (least + 1,) * more + (least,) * (self.parts - more)


class OutputKind(StrEnum):
    LOSS = "loss"
    GRADIENT = "gradient"
    # A gradient that moves to offload memory and leaves device memory.
    OFFLOADED_GRADIENT = "gradient, offloaded"
    # The sum over all ranks and micro-batches, in place of the gradient that this rank accumulated.
    SUMMED = "gradient, summed"
    UPDATE = "update"
    # A value that another part of the same step uses, such as a pipeline stage.
    CARRIED = "carried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A value that leaves the step: the loss, the gradient of ``target``, or its new value."""

    kind: OutputKind
    node: str
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedMean:
    """A mean over those entries of the node ``targets`` that are not ``ignored``."""

    targets: str
    ignored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Sibling modules ``prefix.0 .. prefix.(count-1)`` whose subgraphs have been verified to be
    equal.
    """

    prefix: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The step: ``nodes`` in topological order, forward before backward.

    ``unused`` lists trainable parameters that the loss does not depend on (their gradient stays
    None, as in eager PyTorch). ``eager_peak_bytes`` is the peak memory of eager PyTorch above the
    resident bytes in the same forward and backward pass. ``counts`` are the counted means of the
    loss if a rewrite replaced the operators from which they are normally derived.
    """

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[Output, ...]
    decomposition: str
    runs: tuple[BlockRun, ...] = ()
    unused: tuple[str, ...] = ()
    eager_peak_bytes: int = 0
    counts: tuple[CountedMean, ...] | None = None

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def position(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node.name)
        return {name: tuple(names) for name, names in users.items()}

    @cached_property
    def collectives(self) -> tuple[str, ...]:
        """The nodes that issue a collective."""
        return tuple(node.name for node in self.nodes if node.collective is not None)

    @cached_property
    def reaching_backward(self) -> frozenset[str]:
        """The values that the backward pass depends on, directly or indirectly."""
        useful: set[str] = set()
        for node in reversed(self.nodes):
            if node.phase is not Phase.FORWARD or node.name in useful:
                useful.update(node.inputs)
        return frozenset(useful)

    @cached_property
    def written(self) -> frozenset[int]:
        """Storages that some operator writes in place."""
        return frozenset(s for n in self.nodes for i in n.mutates for s in self.storages_of(i))

    def is_alias(self, node: Node) -> bool:
        """True for a view or a getitem of a multi-output view; any other getitem is a value."""
        return self.by_name[node.inputs[0]].is_free if node.is_getitem else node.is_view

    def has_several(self, name: str) -> bool:
        """True if ``name`` is a multi-output operator with getitem users."""
        node = self.by_name[name]
        return not node.is_free and any(self.by_name[u].is_getitem for u in self.users[name])

    def ancestors(self, name: str) -> tuple[str, ...]:
        """Return the nodes that ``name`` depends on, inputs excluded, ending with ``name``."""
        needed = {name}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(node.inputs)
        return tuple(n.name for n in self.nodes if n.name in needed and not n.is_input)

    @cached_property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of this step at this batch shape; another shape is another graph."""
        calls = (
            f"{n.path}|{n.op}|{n.nth}|{[(t.shape, t.dtype) for t in n.outputs]}|"
            f"{without_refs((*n.args, *(a for _, a in n.kwargs)))}"
            for n in self.forward()
        )
        return self._digest(calls)

    @cached_property
    def model_fingerprint(self) -> str:
        """A digest of the model, the loss and the trained parameters, for any batch shape.

        Sizes decide if a reshape is a view or a copy (one sample may need no copy), so operators
        that compute nothing are excluded.
        """
        tensors = (
            f"{n.name}|{t.shape}|{t.dtype}"
            for n in self.inputs()
            for t in n.outputs
            if self.storages[t.storage].role in (Role.PARAMETER, Role.BUFFER)
        )
        computed = (n for n in self.forward() if not n.is_view and n.op not in _COPIES)
        return self._digest([*tensors, *(f"{n.path}|{n.op}|{n.nth}" for n in computed)])

    def _digest(self, parts: Iterable[str]) -> str:
        digest = sha256(self.decomposition.encode())
        for part, count in sorted(Counter(parts).items()):
            digest.update(f"{part}x{count}\n".encode())
        for target in sorted(o.target for o in self.outputs if o.kind is OutputKind.GRADIENT):
            digest.update(f"trains {target}\n".encode())
        return digest.hexdigest()[:16]

    def inputs(self) -> Iterator[Node]:
        return (node for node in self.nodes if node.is_input)

    def forward(self) -> Iterator[Node]:
        return (n for n in self.nodes if n.phase is Phase.FORWARD and not n.is_input)

    def storages_of(self, name: str) -> tuple[int, ...]:
        # Cached: every rewrite asks for the storages of every value and of every input.
        found = self._storages_by_name.get(name)
        if found is None:
            found = tuple(dict.fromkeys(t.storage for t in self.by_name[name].outputs))
            self._storages_by_name[name] = found
        return found

    @cached_property
    def _storages_by_name(self) -> dict[str, tuple[int, ...]]:
        return {}

    def resident_bytes(self, *roles: Role) -> int:
        """Return the bytes of the input storages with these roles."""
        seen = {t.storage for node in self.inputs() for t in node.outputs}
        return sum(self.storages[s].nbytes for s in seen if self.storages[s].role in roles)

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients of parameters that the graph computes."""
        inputs = {t.storage for node in self.inputs() for t in node.outputs}
        names = (o.node for o in self.outputs if o.kind is OutputKind.GRADIENT)
        computed = {storage for name in names for storage in self.storages_of(name)} - inputs
        return sum(self.storages[storage].nbytes for storage in computed)

    def problems(self) -> list[str]:
        """Return the reasons why the graph is invalid; empty for a valid graph."""
        found: list[str] = []
        seen: set[str] = set()
        for node in self.nodes:
            found += [
                f"{node.name} reads {i} before it exists" for i in node.inputs if i not in seen
            ]
            if node.name in seen:
                found.append(f"{node.name} is defined twice")
            if node.waits_for and node.waits_for not in node.inputs:
                found.append(f"{node.name} waits for {node.waits_for} without reading it")
            seen.add(node.name)
            for tensor in node.outputs:
                if not 0 <= tensor.storage < len(self.storages):
                    found.append(f"{node.name} uses the unknown storage {tensor.storage}")
        found += [f"output {o.node} does not exist" for o in self.outputs if o.node not in seen]
        return found


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element, from the bits in the name (``bfloat16`` has 16).

    A dtype with no bits in its name, or with fewer than 8, takes one byte.
    """
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def path_matches(path: str, pattern: str) -> bool:
    """True if ``path`` matches ``pattern``, in which ``*`` matches one index."""
    ours, theirs = path.split("."), pattern.split(".")
    return len(ours) == len(theirs) and all(
        b == a or (b == "*" and a.isdigit()) for a, b in zip(ours, theirs, strict=True)
    )
