"""The command ``fit``: answers whether a step fits a device, in seconds.

Not for computing the answer: see api/fitting/memory_fit.py.
"""

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from steelyard.cli.arguments import check_range
from steelyard.cli.config_options import ConfigOptions
from steelyard.cli.exit_codes import INFEASIBLE, OK
from steelyard.cli.output_options import OutputOptions, hint, planning
from steelyard.cli.signals import handle_interrupts
from steelyard.cli.training_script import refuse_no_script
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.plans.memory_fit import Fit
from steelyard.report import memory_fit as fit_report
from steelyard.report import terminal
from steelyard.report.output import show_json
from steelyard.safe_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The arguments of ``steelyard fit``."""

    target: str
    is_config: bool
    gpu: str
    batch: int
    sequence: int
    precision: str
    optimizer: str
    lora: int | None
    shown: OutputOptions


def fit_options(
    target: str, *, gpu: str, config: ConfigOptions, shown: OutputOptions
) -> FitOptions:
    """Check the arguments, before torch is imported."""
    is_config = target.endswith(".json") or Path(target).is_dir()
    given = {f"--{name}": value for name, value in asdict(config).items()}
    for option, value in given.items():
        if value is not None and not is_config:
            raise BadInput(
                f"{option} was given for the script {printable(target)}",
                expected="a transformers config.json: a script makes its own model and batches",
                remedy=f"leave out {option}, or give a config.json",
            )
        if isinstance(value, int):
            check_range(option, value, most=2**24, write=8)
    if not is_config:
        refuse_no_script(target, "fit")
    return FitOptions(
        target=target,
        is_config=is_config,
        gpu=gpu,
        batch=config.batch or 1,
        sequence=config.sequence or 2048,
        precision=config.precision or "bf16",
        optimizer=config.optimizer or "adamw",
        lora=config.lora,
        shown=shown,
    )


def fit_by(options: FitOptions) -> int:
    # Report an unknown GPU before importing torch, which takes seconds.
    cluster = Cluster.gpu(options.gpu)
    shown = options.shown
    with planning(shown) as tell:

        def show_verdict(found: Fit) -> None:
            if not shown.json:
                width = terminal.width_of(sys.stdout)
                terminal.write(fit_report.verdict_lines(found, width=width), sys.stdout)

        tell("importing torch")
        from steelyard import api

        handle_interrupts()
        if options.is_config:
            found = api.fit_config(
                api.ConfigRequest(
                    path=Path(options.target),
                    batch=options.batch,
                    sequence=options.sequence,
                    precision=options.precision,
                    lora=options.lora,
                    optimizer=options.optimizer,
                ),
                cluster,
                title=f"{options.target}, batch {options.batch}x{options.sequence}, "
                f"{options.precision}" + (f", LoRA {options.lora}" if options.lora else ""),
                on_verdict=show_verdict,
                on_progress=tell,
            )
        else:
            found = api.fit_script(
                options.target,
                cluster,
                title=options.target,
                on_verdict=show_verdict,
                on_progress=tell,
            )
    if shown.json:
        show_json(fit_report.to_json(found))
    else:
        width = terminal.width_of(sys.stdout)
        terminal.write(fit_report.lever_lines(found, width=width), sys.stdout)
        if not options.is_config:
            words = ["steelyard", "plan", options.target, "--gpu", cluster.device.kind]
            hint(f"next: {shlex.join(words)}", shown)
    return OK if found.fits else INFEASIBLE
