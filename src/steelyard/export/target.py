"""The targets of an export, and the export of a plan to each of them.

Pure: nothing is written. Not for predicting the exported settings: see planner/export/price.py.
"""

from enum import StrEnum

from steelyard.export import accelerate, deepspeed, fsdp2, torchtitan, trainer
from steelyard.export.exported import Exported, ExportedFile, ExportPrice
from steelyard.export.job import Job
from steelyard.export.launch_files import LAUNCHERS, lost_at_launch
from steelyard.export.omissions import Abilities, omissions, refuse_inexpressible, within
from steelyard.export.settings import UNKNOWN_FORMATS, NumberFormats, Settings, settings_of
from steelyard.plans.plan import Decisions, Plan


class ExportTarget(StrEnum):
    """A tool whose configuration is written, or a launcher of the plan itself."""

    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    TORCHTITAN = "torchtitan"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    KUBEFLOW = "kubeflow"
    SKYPILOT = "skypilot"

    @property
    def is_launcher(self) -> bool:
        return self.value in LAUNCHERS

    @property
    def abilities(self) -> Abilities:
        """The settings that the tool has."""
        return _ABILITIES[self]

    def file_name(self, stem: str) -> str:
        """Return the default name of the file; modules of Python have no dots in their names."""
        if self in (ExportTarget.FSDP2, ExportTarget.TORCHTITAN):
            return f"{''.join(c if c.isalnum() else '_' for c in stem)}_{self.value}.py"
        return f"{stem}.{self.value}.{_SUFFIXES[self]}"


_ABILITIES = {
    ExportTarget.TRAINER: trainer.ABILITIES,
    ExportTarget.ACCELERATE: accelerate.ABILITIES,
    ExportTarget.FSDP2: fsdp2.ABILITIES,
    ExportTarget.DEEPSPEED: deepspeed.ABILITIES,
    ExportTarget.TORCHTITAN: torchtitan.ABILITIES,
}
_SUFFIXES = {
    ExportTarget.TRAINER: "json", ExportTarget.ACCELERATE: "yaml", ExportTarget.DEEPSPEED: "json",
    ExportTarget.TORCHRUN: "sh", ExportTarget.SLURM: "sh", ExportTarget.KUBEFLOW: "yaml",
    ExportTarget.SKYPILOT: "yaml",
}  # fmt: skip


def settings_for(
    target: ExportTarget,
    decisions: Decisions,
    *,
    formats: NumberFormats = UNKNOWN_FORMATS,
    device: str = "",
    nodes: int = 1,
) -> Settings:
    """Return the settings of the tool that are nearest to the plan.

    Raise BadInput if the tool cannot lay out the step as the plan does.
    """
    refuse_inexpressible(decisions, target.abilities, tool=target.value)
    found = settings_of(decisions, formats=formats, device=device, nodes=nodes)
    return within(found, target.abilities)


def configuration(
    target: ExportTarget,
    decisions: Decisions,
    settings: Settings,
    *,
    name: str,
    price: ExportPrice | None = None,
    plan_price: ExportPrice | None = None,
    notes: tuple[str, ...] = (),
) -> Exported:
    """Return the tool's configuration with these settings, in a file of this name."""
    lost = omissions(decisions, settings, target.abilities)
    if settings.formats == UNKNOWN_FORMATS:
        notes = (*notes, "the plan does not say its precision, so none is set: check it")
    nearest = f"The nearest settings to plan {decisions.name} that {target.value} can express."
    comment = (nearest, *settings.described(), "Written by steelyard export.")
    match target:
        case ExportTarget.TRAINER:
            found = trainer.configure(settings, name=name)
        case ExportTarget.ACCELERATE:
            found = accelerate.configure(settings, name=name, comment=comment)
        case ExportTarget.DEEPSPEED:
            found = deepspeed.configure(settings, name=name)
        case ExportTarget.FSDP2:
            found = fsdp2.configure(settings, name=name, comment=comment)
        case ExportTarget.TORCHTITAN:
            found = torchtitan.configure(settings, name=name, comment=comment)
        case _:
            raise AssertionError(f"{target} launches plans, and has no settings")
    return Exported(
        target=target.value,
        plan=decisions.name,
        file=ExportedFile(name=name, text=found.text),
        settings=settings,
        lost=lost,
        by_hand=found.by_hand,
        notes=(*notes, *found.notes),
        command=found.command,
        price=price,
        plan_price=plan_price,
        budget_bytes=decisions.budget.memory_bytes,
    )


def launch_file(
    target: ExportTarget, job: Job, *, name: str, price: ExportPrice | None
) -> Exported:
    """Return the file that launches the plan itself, under this name."""
    commands = {
        ExportTarget.TORCHRUN: f"bash {name} --steps 100",
        ExportTarget.SLURM: f"sbatch {name} --steps 100",
        ExportTarget.KUBEFLOW: f"kubectl apply -f {name}",
        ExportTarget.SKYPILOT: f"sky launch {name}",
    }
    by_hand = {
        ExportTarget.KUBEFLOW: ("replace IMAGE by an image with torch, Steelyard and the script",),
        ExportTarget.SKYPILOT: ("install torch and Steelyard in setup",),
    }
    return Exported(
        target=target.value,
        plan=job.decisions.name,
        file=ExportedFile(name=name, text=LAUNCHERS[target.value](job)),
        settings=None,
        lost=lost_at_launch(job.decisions),
        by_hand=by_hand.get(target, ()),
        notes=job.notes(),
        command=commands[target],
        price=price,
        plan_price=price,
        budget_bytes=job.decisions.budget.memory_bytes,
        job=job.described(),
    )


def price_of(plan: Plan | None) -> ExportPrice | None:
    """Return the stored prediction of a plan, if there is one."""
    if plan is None:
        return None
    metrics = plan.predicted.metrics
    return ExportPrice(memory_bytes=metrics.memory_bytes, step_seconds=metrics.step_seconds)
