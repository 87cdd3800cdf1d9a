"""Captures the optimizer's step as a program, traced on fake parameters and gradients.

The second step is captured, because the first one creates the state. Not for running the step: the
live optimizer does that.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.tracing.fake_execution import StorageWatch, fake_like
from steelyard.capture.tracing.to_ir import layout, plain_argument, signature_of_call
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Graph, Node, Phase, Ref, Role, Storage, Tensor
from steelyard.ir.placement import Shard, local_shape, local_stride
from steelyard.ir.program import Instruction, Program

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# The shards of parameters by name: (shard, number of ranks) per mesh axis, applied in order.
ShardsByParameter = Mapping[str, Sequence[tuple[Shard, int]]]


def capture_update(
    model: nn.Module,
    make: OptimizerFactory,
    *,
    without_gradient: frozenset[str] = frozenset(),
    shares: ShardsByParameter = MappingProxyType({}),
) -> Program:
    """Capture the optimizer's step; ``shares`` says which parameters are sharded for this rank."""
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameters[name] = _fake_parameter(parameter, mode, shares.get(name, ()))
    with mode:
        optimizer = _make_optimizer(make, list(parameters.values()))
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in without_gradient:
                parameter.grad = torch.empty_like(parameter)
        try:
            optimizer.step()
            recorder = _OptimizerRecorder(parameters, optimizer)
            with recorder.watch:
                optimizer.step()
        except Exception as error:
            _refuse_values(f"{type(optimizer).__name__}.step()", error)
            raise CaptureRefused(
                f"{type(optimizer).__name__}.step() cannot be traced: {str(error)[:120]}",
                expected="an optimizer whose step needs no closure and no tensor values",
                remedy="plan without optimizer= and step your own after step.backward(batch)",
            ) from error
    return recorder.program()


def _fake_parameter(
    parameter: nn.Parameter, mode: Any, shards: Sequence[tuple[Shard, int]]
) -> nn.Parameter:
    fake = fake_like(parameter, mode)
    assert isinstance(fake, nn.Parameter)
    for shard, num_ranks in shards:
        shape = local_shape(tuple(fake.shape), shard, num_ranks)
        stride = local_stride(tuple(fake.shape), fake.stride(), shape)
        with mode:
            fake.data = torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)
    return fake


def _make_optimizer(
    make: OptimizerFactory, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    try:
        optimizer = make(parameters)
    except Exception as error:
        _refuse_values("optimizer=", error)
        raise CaptureRefused(
            f"optimizer= cannot be made from the parameters: {type(error).__name__}: "
            f"{str(error)[:100]}",
            expected="a function of parameters, such as partial(torch.optim.AdamW, lr=3e-4)",
            remedy="pass the class or a partial of it, not an optimizer that already exists",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CaptureRefused(
            f"optimizer= made a {type(optimizer).__name__}",
            expected="a torch.optim.Optimizer",
            remedy="pass a function such as partial(torch.optim.AdamW, lr=3e-4)",
        )
    refuse_foreign(optimizer, parameters)
    return optimizer


def check_optimizer(model: nn.Module, make: OptimizerFactory) -> None:
    """Create the optimizer on fake parameters once, to report its errors before a capture."""
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    twins = [_fake_parameter(parameter, mode, ()) for parameter in model.parameters()]
    with mode:
        _make_optimizer(make, twins)


def leaner_settings(model: nn.Module, make: OptimizerFactory) -> tuple[str, ...]:
    """Return the settings of the optimizer that would lower the memory that its step needs.

    Without ``foreach``, temporaries exist for one parameter at a time; a fused step has none.
    """
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    twins = [_fake_parameter(parameter, mode, ()) for parameter in model.parameters()]
    with mode:
        settings = _make_optimizer(make, twins).defaults
    is_on_gpu = any(parameter.is_cuda for parameter in twins)
    # By default, torch uses foreach on a GPU, and neither foreach nor fused on a CPU.
    is_foreach = settings.get("foreach", False) or (
        is_on_gpu and settings.get("foreach", False) is None and not settings.get("fused")
    )
    found = ["foreach=False"] if is_foreach else []
    if "fused" in settings and not settings["fused"]:
        found.append("fused=True")
    return tuple(found)


def refuse_foreign(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer whose parameters are not those that it was given."""
    own = {id(parameter) for parameter in parameters}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in updated if id(p) not in own]
    if foreign:
        shape = list(foreign[0].shape)
        raise CaptureRefused(
            f"optimizer= made a {type(optimizer).__name__} over {len(foreign)} of {len(updated)} "
            f"parameters that are not the model's, the first of shape {shape}",
            expected="an optimizer over the parameters that are passed to the function",
            remedy="write optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4), "
            "and use only these parameters",
        )


def _refuse_values(what: str, error: Exception) -> None:
    if "_local_scalar_dense" in str(error):
        raise CaptureRefused(
            f"{what} reads a number from a tensor",
            expected="an optimizer whose operators do not depend on the values of tensors",
            remedy="give lr and betas as plain numbers, take another optimizer, or plan without "
            "optimizer= and step your own after step.backward(batch)",
        ) from error


class _OptimizerRecorder:
    """Records the operators of one optimizer step as nodes."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._name_of_storage: dict[int, str] = {}
        self._tensors_alive: list[torch.Tensor] = []  # keeps ids and storage keys from being reused
        self._nodes: list[Node] = []
        self._instructions: list[Instruction] = []
        self._freed: list[str] = []
        for name, parameter in parameters.items():
            self._add_input(f"parameter:{name}", parameter, Role.PARAMETER)
            if parameter.grad is not None:
                self._add_input(f"gradient:{name}", parameter.grad, Role.GRADIENT)
        names = {id(parameter): name for name, parameter in parameters.items()}
        for trained, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._add_input(f"state:{names[id(trained)]}:{key}", value, Role.STATE)
        self.watch = StorageWatch(
            list(self._tensors_alive), on_call=self._on_call, on_death=self._on_death
        )

    def program(self) -> Program:
        self._flush_freed()  # values that are alive to the end of the last parameter's update
        graph = Graph(
            nodes=tuple(self._nodes),
            storages=tuple(self._storages),
            outputs=(),
            decomposition="eager",
        )
        return Program(graph=graph, instructions=tuple(self._instructions))

    def _add_input(self, name: str, tensor: torch.Tensor, role: Role) -> None:
        self._tensors_alive.append(tensor)
        self._set_name(tensor, name)
        outputs = (self._tensor(tensor, role),)
        self._name_of_storage[outputs[0].storage] = name
        self._nodes.append(Node(name=name, op="input", outputs=outputs, phase=Phase.UPDATE))

    def _on_call(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if operator.namespace == "profiler":  # profiler ranges that torch.optim opens
            return
        self._flush_freed()
        name = f"update_{len(self._instructions)}"
        leaves = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        inputs = tuple(dict.fromkeys(self._name(leaf) for leaf in leaves))
        results = [x for x in _torch.tree_leaves(result) if isinstance(x, torch.Tensor)]
        mutated = _torch.mutates(operator)
        known = {_torch.storage_key(leaf) for leaf in leaves}
        is_view = bool(results) and all(_torch.storage_key(r) in known for r in results)
        outputs = tuple(self._tensor(r, Role.ACTIVATION) for r in results)
        moved = sum(x.numel() * x.element_size() for x in [*leaves, *results])
        self._nodes.append(
            Node(
                name=name,
                op=str(operator),
                args=tuple(plain_argument(a, self._ref) for a in args),
                kwargs=tuple((k, plain_argument(v, self._ref)) for k, v in kwargs.items()),
                inputs=inputs,
                outputs=outputs,
                phase=Phase.UPDATE,
                path="optimizer",
                signature=signature_of_call(
                    operator, args, kwargs, layout_of=layout, name_of=self._name
                ),
                moved_bytes=0 if is_view and not mutated else moved,
                is_view=is_view and not mutated,
                mutates=inputs[:1] if mutated else (),
            )
        )
        self._add_instruction(name, inputs)
        for tensor in outputs:
            self._name_of_storage.setdefault(tensor.storage, name)
        if len(results) == 1:
            self._set_name(results[0], name)
        else:
            self._record_getitems(name, results, outputs)

    def _record_getitems(
        self, name: str, results: list[torch.Tensor], outputs: tuple[Tensor, ...]
    ) -> None:
        for index, (leaf, tensor) in enumerate(zip(results, outputs, strict=True)):
            part = f"{name}.{index}"
            self._nodes.append(
                Node(
                    name=part,
                    op="getitem",
                    args=(Ref(name), index),
                    inputs=(name,),
                    outputs=(tensor,),
                    phase=Phase.UPDATE,
                    path="optimizer",
                    is_view=True,
                )
            )
            self._add_instruction(part, (name,))
            self._set_name(leaf, part)

    def _add_instruction(self, name: str, inputs: tuple[str, ...]) -> None:
        self._instructions.append(
            Instruction(node=name, value=name, inputs=inputs, phase=Phase.UPDATE)
        )

    def _set_name(self, tensor: torch.Tensor, name: str) -> None:
        known = self._names.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._names[id(tensor)] = (weakref.ref(tensor), name)

    def _on_death(self, key: int) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            self._freed.append(self._name_of_storage[number])

    def _flush_freed(self) -> None:
        """Make the last operator read the values that were freed after it, since they were alive
        until then.
        """
        if self._freed and self._instructions:
            last = self._instructions[-1]
            inputs = tuple(dict.fromkeys([*last.inputs, *self._freed]))
            self._instructions[-1] = Instruction(
                node=last.node, value=last.value, inputs=inputs, phase=last.phase
            )
        self._freed.clear()

    def _tensor(self, tensor: torch.Tensor, role: Role) -> Tensor:
        key = _torch.storage_key(tensor)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._storages)
            nbytes = int(tensor.untyped_storage().nbytes())
            self._storages.append(Storage(nbytes=nbytes, role=role))
        return Tensor(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            storage=number,
            offset=int(tensor.storage_offset()),
        )

    def _name(self, tensor: torch.Tensor) -> str:
        known = self._names.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        # A number that the optimizer converted to a tensor outside of the recorded operators.
        name = f"constant:{len(self._nodes)}"
        self._add_input(name, tensor, Role.CONSTANT)
        return name

    def _ref(self, tensor: torch.Tensor) -> Ref:
        return Ref(self._name(tensor))
