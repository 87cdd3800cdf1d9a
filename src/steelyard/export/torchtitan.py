"""A Python file that changes a configuration of torchtitan.

The fields are those of torchtitan 0.3, whose configurations are dataclasses made by functions. The
model and its data stay those of the configuration that is changed. Not for models that torchtitan
does not have.
"""

from collections.abc import Iterator

from steelyard.export.exported import ToolConfiguration
from steelyard.export.omissions import Abilities
from steelyard.export.settings import Settings

ABILITIES = Abilities(tensor=True, pipeline=True, chunks=True)


def configure(settings: Settings, *, name: str, comment: tuple[str, ...]) -> ToolConfiguration:
    """Return the configuration in a file of this name."""
    module = name.removesuffix(".py")
    steps = (
        f"in your config_registry: from {module} import with_plan, and return "
        "with_plan(llama3_8b()), or with another configuration of yours"
    )
    return ToolConfiguration(
        text=_text(settings, comment),
        by_hand=(steps,),
        command=f"{settings.torchrun} -m torchtitan.train --module your_module "
        "--config your_config",
    )


def _text(settings: Settings, comment: tuple[str, ...]) -> str:
    imports = ["from torchtitan.trainer import Trainer"]
    if settings.recomputes_blocks:
        imports.insert(0, "from torchtitan.distributed.activation_checkpoint import FullAC")
    if settings.chunks:
        imports.insert(0, "from torchtitan.components.loss import ChunkedLossWrapper")
    lines = [f"    {line}" for line in _changes(settings)]
    head = "\n".join(comment)
    return (
        f'"""{head}\n"""\n\n' + "\n".join(imports) + "\n\n\n"
        "def with_plan(config: Trainer.Config) -> Trainer.Config:\n"
        '    """Return the configuration with the settings of the plan."""\n'
        + "\n".join(lines)
        + "\n    return config\n"
    )


def _changes(settings: Settings) -> Iterator[str]:
    layout = settings.layout
    is_pipeline = layout.pipeline > 1
    local = settings.per_device_batch * (settings.micro_batches if is_pipeline else 1)
    yield f"config.training.local_batch_size = {local}"
    yield f"config.training.global_batch_size = {settings.batch}"
    if settings.sequence:
        yield f"config.training.seq_len = {settings.sequence}"
    weights = "bfloat16" if settings.formats.weights == "bfloat16" else "float32"
    is_bf16 = weights == "bfloat16" or settings.formats.mixed_precision == "bf16"
    yield f"config.training.dtype = {weights!r}".replace("'", '"')
    products = "bfloat16" if is_bf16 else "float32"
    yield f'config.training.mixed_precision_param = "{products}"'
    yield f"config.training.enable_cpu_offload = {bool(settings.offloaded_state)}"
    copies, shards = (1, layout.data) if settings.shards_state else (layout.data, 1)
    yield f"config.parallelism.data_parallel_replicate_degree = {copies}"
    yield f"config.parallelism.data_parallel_shard_degree = {shards}"
    reshard = "always" if settings.zero_stage == 3 and settings.regathers else "never"
    yield f'config.parallelism.fsdp_reshard_after_forward = "{reshard}"'
    yield f"config.parallelism.tensor_parallel_degree = {layout.tensor}"
    yield f"config.parallelism.pipeline_parallel_degree = {layout.pipeline}"
    if is_pipeline:
        # torchtitan 0.3 refuses both together.
        yield "config.training.disable_cuda_graphs = True"
        yield f'config.parallelism.pipeline_parallel_schedule = "{settings.schedule}"'
        size = settings.per_device_batch
        yield f"config.parallelism.pipeline_parallel_microbatch_size = {size}"
    checkpointing = "FullAC.Config()" if settings.recomputes_blocks else "None"
    yield f"config.activation_checkpoint = {checkpointing}"
    yield f"config.compile.enable = {settings.compiles}"
    if settings.chunks:
        yield "loss = config.loss"
        yield "if isinstance(loss, ChunkedLossWrapper.Config):"
        yield "    loss = loss.loss_fn"
        count = _chunks(settings)
        yield f"config.loss = ChunkedLossWrapper.Config(loss_fn=loss, num_chunks={count})"


def _chunks(settings: Settings) -> int:
    """Return the number of chunks; torchtitan's must divide the tokens of a sample."""
    length = settings.sequence
    possible = (n for n in range(settings.chunks, length + 1) if length % n == 0)
    return next(possible, settings.chunks)
