"""The command ``fit``: answers whether a step fits a device, in seconds.

Not for computing the answer: see api/fitting/memory_fit.py.
"""

import re
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from steelyard.cli.arguments import check_range, cluster_of
from steelyard.cli.config_options import ConfigOptions, FitDevices
from steelyard.cli.exit_codes import INFEASIBLE, OK
from steelyard.cli.output_options import OutputOptions, hint, planning
from steelyard.cli.signals import handle_interrupts
from steelyard.cli.training_script import refuse_no_script
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster, Device
from steelyard.plans.memory_fit import Fit
from steelyard.report import memory_fit as fit_report
from steelyard.report import terminal
from steelyard.report.output import show_json
from steelyard.safe_text import printable

# Two of a GPU are written as 2xRTX-4090.
_TIMES = re.compile(r"(?P<count>\d{1,6})\s*x\s*(?P<kind>.+)", re.ASCII | re.IGNORECASE)
_MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The arguments of ``steelyard fit``."""

    target: str
    is_config: bool
    devices: FitDevices
    batch: int
    sequence: int
    precision: str
    optimizer: str
    lora: int | None
    shown: OutputOptions


def fit_options(
    target: str, *, devices: FitDevices, config: ConfigOptions, shown: OutputOptions
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
        devices=devices,
        batch=config.batch or 1,
        sequence=config.sequence or 2048,
        precision=config.precision or "bf16",
        optimizer=config.optimizer or "adamw",
        lora=config.lora,
        shown=shown,
    )


def devices_of(given: FitDevices) -> tuple[Device, int]:
    """Return the device, and the number of devices that train together."""
    if (given.gpu is None) == (given.cluster is None):
        raise BadInput(
            "no device was given" if given.gpu is None else "--gpu and --cluster both name devices",
            expected="either a GPU, or a cluster whose devices are of one kind",
            remedy="write --gpu RTX-4090, --gpu 2xRTX-4090 or --cluster dgx-h100",
        )
    if given.cluster is not None:
        if given.gpus is not None:
            raise BadInput(
                "--gpus was given with --cluster",
                expected="a cluster, which has its own number of devices",
                remedy="leave out --gpus, or name one GPU with --gpu",
            )
        cluster = cluster_of(given.cluster, 1, None)
        return cluster.device, cluster.num_devices
    assert given.gpu is not None
    times = _TIMES.fullmatch(given.gpu)
    if times is not None and given.gpus is not None:
        raise BadInput(
            f"--gpu {printable(given.gpu, most=60)} and --gpus {given.gpus} both give a number",
            expected="one number of GPUs",
            remedy=f"write --gpu {printable(times['kind'], most=60)} --gpus {given.gpus}",
        )
    count = int(times["count"]) if times is not None else 1 if given.gpus is None else given.gpus
    check_range("--gpus", count, most=_MOST_DEVICES, write=2)
    return Cluster.gpu(given.gpu if times is None else times["kind"]).device, count


def _next_command(options: FitOptions, device: Device) -> list[str]:
    devices = options.devices
    named = ["--cluster", devices.cluster] if devices.cluster else ["--gpu", device.kind]
    return ["steelyard", "plan", options.target, *named]


def fit_by(options: FitOptions) -> int:
    # Report unknown devices before importing torch, which takes seconds.
    device, count = devices_of(options.devices)
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
                device,
                devices=count,
                title=f"{options.target}, batch {options.batch}x{options.sequence}, "
                f"{options.precision}" + (f", LoRA {options.lora}" if options.lora else ""),
                on_verdict=show_verdict,
                on_progress=tell,
            )
        else:
            found = api.fit_script(
                options.target,
                device,
                devices=count,
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
            hint(f"next: {shlex.join(_next_command(options, device))}", shown)
    return OK if found.fits else INFEASIBLE
