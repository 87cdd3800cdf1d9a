"""A Python file with calls of PyTorch's ``fully_shard`` and ``checkpoint_wrapper``.

It needs PyTorch only. It finds the blocks of a model when it is called, so that it names no module.
Autocast stays where it is, in the user's loss. Not for tensor and pipeline parallelism.
"""

from collections.abc import Iterator

from steelyard.export.exported import ToolConfiguration
from steelyard.export.omissions import Abilities
from steelyard.export.settings import Settings

ABILITIES = Abilities(buckets=True, activation_offload=True, zero_stages=(0, 2, 3))

_BLOCKS = '''
def blocks(model):
    """Return the place of each block: modules of one class in a list, outermost lists first."""
    found, inside = [], set()
    for siblings in model.modules():
        if not isinstance(siblings, (nn.ModuleList, nn.Sequential)) or id(siblings) in inside:
            continue
        if len(siblings) > 1 and len({type(block) for block in siblings}) == 1:
            found += [(siblings, name) for name, _ in siblings.named_children()]
            inside.update(id(module) for module in siblings.modules())
    return found
'''

_PARTS = '''
def micro_batches(batch):
    """Return the equal parts of a rank's batch: tensors, or dicts, lists and tuples of them."""
    if isinstance(batch, dict):
        parts = {key: micro_batches(value) for key, value in batch.items()}
        return [{key: parts[key][i] for key in parts} for i in range(MICRO_BATCHES)]
    if isinstance(batch, (list, tuple)):
        return [type(batch)(part) for part in zip(*map(micro_batches, batch), strict=True)]
    if len(batch) != MICRO_BATCHES * SAMPLES:
        raise ValueError(f"a rank's batch has {len(batch)} rows, not {MICRO_BATCHES * SAMPLES}")
    return list(batch.split(SAMPLES))
'''


def configure(settings: Settings, *, name: str, comment: tuple[str, ...]) -> ToolConfiguration:
    """Return the Python file of this name."""
    module = name.removesuffix(".py")
    steps = (
        f"from {module} import apply, train_step; model = apply(model); call "
        "train_step(model, loss, batch, optimizer) with the samples of the rank"
    )
    return ToolConfiguration(
        text=_text(settings, comment),
        by_hand=(steps,),
        command=f"{settings.torchrun} train.py",
    )


def _text(settings: Settings, comment: tuple[str, ...]) -> str:
    head = "\n".join(comment)
    parts = [
        f'"""{head}\n"""\n',
        "\n".join(_imports(settings)),
        f"\nRANKS = {settings.layout.data}",
        f"MICRO_BATCHES = {settings.micro_batches}",
        f"# Samples of one micro-batch on one rank.\nSAMPLES = {settings.per_device_batch}\n",
        _BLOCKS,
        "\n" + "\n".join(_apply(settings)) + "\n",
        _PARTS,
        "\n" + "\n".join(_step(settings)) + "\n",
    ]
    return "\n".join(parts)


def _uses_fsdp(settings: Settings) -> bool:
    return settings.shards_state or bool(settings.offloaded_state)


def _imports(settings: Settings) -> Iterator[str]:
    uses_fsdp = _uses_fsdp(settings)
    yield "from torch import nn"
    wrappers = [
        *(["checkpoint_wrapper"] if settings.recomputes_blocks else []),
        *(["offload_wrapper"] if settings.offloads_activations else []),
    ]
    if wrappers:
        yield "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ("
        yield from (f"    {name}," for name in wrappers)
        yield ")"
    if uses_fsdp:
        yield "from torch.distributed.device_mesh import init_device_mesh"
        names = [
            *(["CPUOffloadPolicy"] if settings.offloaded_state else []),
            "fully_shard",
        ]
        yield f"from torch.distributed.fsdp import {', '.join(names)}"
    elif settings.layout.data > 1:
        yield "from torch.nn.parallel import DistributedDataParallel"


def _apply(settings: Settings) -> Iterator[str]:
    device = settings.device or "cuda"
    yield f'def apply(model, device_type="{device}"):'
    yield '    """Change the model, on the device of the rank; make the optimizer afterwards."""'
    wrapped = "block"
    if settings.recomputes_blocks:
        wrapped = f"checkpoint_wrapper({wrapped})"
    if settings.offloads_activations:
        wrapped = f"offload_wrapper({wrapped})"
    if wrapped != "block":
        yield "    for siblings, name in blocks(model):"
        yield "        block = siblings.get_submodule(name)"
        yield f"        siblings.register_module(name, {wrapped})"
    if _uses_fsdp(settings):
        yield from _shard(settings)
    elif settings.layout.data > 1:
        mib = max(1, round(settings.bucket_bytes / 2**20))
        yield f"    model = DistributedDataParallel(model, bucket_cap_mb={mib})"
    if settings.compiles:
        yield "    model.compile()"
    yield "    return model"


def _shard(settings: Settings) -> Iterator[str]:
    yield "    how = {"
    yield '        "mesh": init_device_mesh(device_type, (RANKS,)),'
    reshard = settings.zero_stage == 3 and settings.regathers
    yield f'        "reshard_after_forward": {reshard},'
    if settings.offloaded_state:
        yield '        "offload_policy": CPUOffloadPolicy(pin_memory=device_type != "cpu"),'
    yield "    }"
    yield "    for siblings, name in blocks(model):"
    yield "        fully_shard(siblings.get_submodule(name), **how)"
    yield "    fully_shard(model, **how)"


def _step(settings: Settings) -> Iterator[str]:
    is_ddp = settings.layout.data > 1 and not _uses_fsdp(settings)
    yield "def train_step(model, loss, batch, optimizer):"
    yield '    """Train on this rank\'s part of the batch; return the mean of its losses."""'
    yield "    optimizer.zero_grad()"
    yield "    total = 0.0"
    if is_ddp:
        yield "    for number, part in enumerate(micro_batches(batch), start=1):"
        yield "        # The last micro-batch exchanges the sum of the gradients."
        yield "        model.require_backward_grad_sync = number == MICRO_BATCHES"
    else:
        yield "    for part in micro_batches(batch):"
    yield "        value = loss(model, part) / MICRO_BATCHES"
    yield "        value.backward()"
    yield "        total += value.detach()"
    yield "    optimizer.step()"
    yield "    return total"
