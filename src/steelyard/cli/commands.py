"""The commands: each reads its arguments, calls the api and prints the result.

Commands decide nothing and connect nothing. A command that only reads a plan never imports torch.
Each imports what it alone needs when it is called, so that ``--help`` and ``explain`` start fast.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from steelyard import __version__
from steelyard.cli.arguments import (
    check_range,
    checkpoint_interval,
    cluster_of,
    cluster_or_gpu,
    device_range,
    explanation_of,
    parse_what_if,
    plan_path,
    planned_for,
    refuse_contradictions,
    refuse_elsewhere,
    refuse_no_folder,
    refuse_same_file,
    refuse_unwritable,
    resume_from,
    title,
    training_length,
    waits_seconds,
    whole_number,
)
from steelyard.cli.config_options import ConfigOptions, FitDevices, OneGpu
from steelyard.cli.exit_codes import BAD_INPUT, OK, RUN_FAILED, user_code
from steelyard.cli.export_command import export
from steelyard.cli.offload_options import OffloadOptions
from steelyard.cli.output_options import OutputOptions, hint, load_script, planning
from steelyard.cli.signals import handle_interrupts
from steelyard.cli.training_script import refuse_no_script, script_path
from steelyard.cli.why_command import why
from steelyard.errors import BadInput
from steelyard.garbage_collection import without_collection
from steelyard.plans.budget import Budget, Effort, Maximize, Minimize
from steelyard.report.styled_text import Zoom

_EXIT_CODES = """Exit codes: 0 ok, 2 bad input, 3 no plan fits the budget, 4 the run failed,
5 a measurement outside its predicted interval (run --strict), 130 interrupted,
143 terminated."""

app = App(
    name="steelyard",
    help="Makes a PyTorch training step fit a budget, predicts the cost beforehand, and shows "
    "the measured cost afterwards.",
    help_epilogue=_EXIT_CODES,
    help_format="plaintext",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.register_install_completion_command()


_DEFAULT_OUTPUT, _NO_OFFLOAD, _NO_CONFIG = OutputOptions(), OffloadOptions(), ConfigOptions()
_NO_DEVICES, _NO_GPU = FitDevices(), OneGpu()
_Train = Annotated[
    str, Parameter(help="Script with a workload() function; train.py:name selects one of several.")
]
_Runner = Annotated[
    Literal["python", "inductor"], Parameter(help="Runner of the step; plans are for one runner.")
]
_Ranks = Annotated[
    int,
    Parameter(
        help="Maximum number of local ranks; each gets its part of the cores.",
        converter=whole_number,
    ),
]
_COPY = "copy the plan file to a writable folder"
_OTHER_PAGE = "choose another place with --html"
_Page = Annotated[Path | None, Parameter(help="Also write one HTML page.")]


@app.command
def plan(
    train: _Train,
    /,
    *,
    memory: Annotated[str | None, Parameter(help="Memory budget, such as 300MiB.")] = None,
    step_time: Annotated[
        str | None, Parameter(help="Budget for the time of a step, such as 120ms.")
    ] = None,
    communication: Annotated[
        str | None, Parameter(help="Budget for its communication, such as 20ms.")
    ] = None,
    computation: Annotated[
        str | None, Parameter(help="Budget for its computation, such as 100ms.")
    ] = None,
    accuracy_loss: Annotated[str, Parameter(help="Budget for accuracy loss, such as 0.5%.")] = "0",
    maximize: Annotated[
        Maximize | None, Parameter(help="Find the largest batch or sequence that fits.")
    ] = None,
    minimize: Annotated[
        Minimize | None, Parameter(help="Find the fewest devices of a declared cluster.")
    ] = None,
    effort: Annotated[Effort, Parameter(help="How long to search.")] = Effort.NORMAL,
    runner: _Runner = "python",
    ranks: _Ranks = 1,
    speeds: Annotated[
        str | None,
        Parameter(help="Relative speed of each rank, such as 1,0.5; measured by default."),
    ] = None,
    cluster: Annotated[
        str | None,
        Parameter(
            help="Plan for this declared cluster: a TOML file, or a preset such as dgx-h100."
        ),
    ] = None,
    device: OneGpu = _NO_GPU,
    offload: OffloadOptions = _NO_OFFLOAD,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="Default: train.plan.toml.")
    ] = None,
    check: Annotated[
        Path | None, Parameter(help="Check this plan file, edited or not, and predict it again.")
    ] = None,
    what_if: Annotated[
        str | None, Parameter(help="Also show the plan for another budget, such as memory=4GiB.")
    ] = None,
    why_not: Annotated[
        str | None, Parameter(help="Explain why this trade was not applied.")
    ] = None,
    zoom: Annotated[Zoom, Parameter(help="Level of detail.")] = Zoom.RECEIPT,
    html: _Page = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Make the step fit a budget, explain the cost and the reasons, and write a plan file."""
    from steelyard.cli.plan_command import PlanOptions, plan_by
    from steelyard.ir.rule import MOST_RANKS
    from steelyard.plan_files.plan_file import read_decisions
    from steelyard.trades import check_trade

    refuse_no_script(train, "plan")
    check_range("--ranks", ranks, most=MOST_RANKS, write=2)
    cluster = cluster_or_gpu(cluster, device.gpu, device.host_memory)
    path = check or output or plan_path(train)
    refuse_same_file("--html", html, path, explanation_of(path), script_path(train))
    if output or path.parent.is_dir():
        refuse_unwritable(path, _COPY if check else "choose another place with -o")
    refuse_unwritable(html, _OTHER_PAGE)
    budget = Budget(memory, step_time, communication, computation, accuracy_loss)
    question, offload_memory = parse_what_if(what_if), offload.memory()
    if check is not None:
        searched = (budget != Budget(), maximize, minimize, output, offload_memory, speeds)
        if any(searched) or device.host_memory or ranks > 1 or runner != "python":
            raise BadInput(
                "--check takes its budget from the plan file",
                expected="--check without a budget, --maximize, --minimize, --runner, --ranks, "
                "--speeds, --offload-dir or -o",
                remedy=f"change [budget] in {check}, or leave out --check",
            )
        read_decisions(check)
    refuse_contradictions(
        maximize=maximize, minimize=minimize, runner=runner, ranks=ranks, cluster=cluster
    )
    if why_not is not None:
        # Before planning, which takes minutes.
        check_trade(why_not)
    return plan_by(
        PlanOptions(
            train=train, path=path, is_check=check is not None, budget=budget, runner=runner,
            maximize=maximize, minimize=minimize, effort=effort, ranks=ranks, speeds=speeds,
            cluster=cluster, host_memory=device.host_memory, offload_memory=offload_memory,
            what_if=question, why_not=why_not, zoom=zoom, html=html, shown=shown, )
    )  # fmt: skip


@app.command
def fit(
    target: Annotated[
        str,
        Parameter(
            help="A script with a function workload(), or a transformers config.json or its folder."
        ),
    ],
    /,
    *,
    devices: FitDevices = _NO_DEVICES,
    config: ConfigOptions = _NO_CONFIG,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Answer within seconds whether a step fits a GPU, and what would make it fit."""
    from steelyard.cli.fit_command import fit_by, fit_options

    return fit_by(fit_options(target, devices=devices, config=config, shown=shown))


@app.command
def run(
    train: Annotated[
        str, Parameter(help="The script (its train.plan.toml is used) or the plan file.")
    ],
    /,
    *,
    plan: Annotated[Path | None, Parameter(help="Default: train.plan.toml.")] = None,
    steps: Annotated[
        int,
        Parameter(
            help="Total number of steps, including earlier ones of a resumed run.",
            converter=whole_number,
        ),
    ] = 100,
    checkpoint: Annotated[
        Path | None, Parameter(help="Folder for checkpoints; the newest three are kept.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        Parameter(help="Steps between two checkpoints; 100 by default.", converter=whole_number),
    ] = None,
    resume: Annotated[
        list[Path] | None,
        Parameter(
            consume_multiple=(0, 1),
            negative="",
            help="Resume from the newest checkpoint in this folder, by default that of "
            "--checkpoint.",
        ),
    ] = None,
    seed: Annotated[
        int, Parameter(help="Seed of all random generators.", converter=whole_number)
    ] = 0,
    strict: Annotated[
        bool,
        Parameter(
            negative="", help="Exit with code 5 if a measurement is outside its predicted interval."
        ),
    ] = False,
    adapt: Annotated[
        bool,
        Parameter(
            negative="",
            help="Switch the plan's gradient communication if links change; writes another plan "
            "file.",
        ),
    ] = False,
    rank_timeout: Annotated[
        str, Parameter(help="How long one rank may wait for another, such as 5min.")
    ] = "5min",
    html: _Page = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Train with a plan, and show the measured cost beside the predicted cost."""
    from steelyard.cli.run_command import RunOptions, run_by
    from steelyard.run.checkpoint.position import refuse_impossible

    start, folder = resume_from(resume, checkpoint)
    check_range("--steps", steps)
    check_range("--seed", seed, least=0, most=2**63 - 1, write=0)
    every = checkpoint_interval(checkpoint_every, folder)
    waits_seconds(rank_timeout)
    refuse_no_folder("--checkpoint", folder)
    if train.endswith(".toml"):
        train, path, declared = planned_for(train, plan, None, verb="run")
        refuse_elsewhere(declared, path)
        refuse_no_script(train, "run")
    else:
        refuse_no_script(train, "run")
        path = plan or plan_path(train)
    refuse_same_file("--html", html, path, explanation_of(path), script_path(train))
    if path.exists():
        refuse_unwritable(path, _COPY)
    refuse_unwritable(html, _OTHER_PAGE)
    refuse_impossible(start, folder)
    return run_by(
        RunOptions(
            train=train, path=path, steps=steps, folder=folder, every=every, resume=start,
            seed=seed, strict=strict, adapt=adapt, rank_timeout=rank_timeout, html=html,
            shown=shown,
        )
    )  # fmt: skip


@app.command
def frontier(
    train: _Train,
    /,
    *,
    runner: _Runner = "python",
    offload: OffloadOptions = _NO_OFFLOAD,
    html: _Page = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Show the whole memory-time curve instead of one of its points."""
    from steelyard.report.document import tree_of
    from steelyard.report.output import show, write_page

    refuse_no_script(train, "frontier")
    refuse_same_file("--html", html, script_path(train))
    refuse_unwritable(html, _OTHER_PAGE)
    offload_memory = offload.memory()
    with planning(shown) as tell:
        workload = load_script(train, tell)
        from steelyard import api

        planned = api.plan_workload(
            workload, budget=Budget(), runner=runner, maximize=None,
            cluster=cluster_of(None, 1, offload_memory), title=title(train), on_progress=tell,
        ).with_frontier()  # fmt: skip
        detail = planned.detail() if html else None
    tree = tree_of(planned.plan)
    show(tree, zoom=Zoom.FRONTIER, in_json=shown.json)
    write_page(tree, html, detail=detail)
    hint(f"next: steelyard plan {shlex.quote(train)} --memory (one of these)", shown)
    return OK


@app.command
def simulate(
    train: Annotated[
        str, Parameter(help="The plan file, or the script (its train.plan.toml is used).")
    ],
    /,
    *,
    plan: Annotated[Path | None, Parameter(help="Default: train.plan.toml.")] = None,
    cluster: Annotated[
        str | None, Parameter(help="The cluster file of the plan, if it has moved.")
    ] = None,
    trace: Annotated[Path, Parameter(help="Output file for the schedule, as JSON for Perfetto.")],
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Draw the schedule of the predicted step, with the work of each rank over time; nothing is
    run.
    """
    from steelyard.report.output import show_json, show_text
    from steelyard.report.perfetto import by_rank, to_trace
    from steelyard.safe_files import write_whole

    refuse_unwritable(trace, "choose another place with --trace")
    if not train.endswith(".toml"):
        refuse_no_script(train, "simulate")
    script, path, target = planned_for(train, plan, cluster)
    refuse_no_script(script, "simulate")
    refuse_same_file("--trace", trace, path, explanation_of(path), script_path(script))
    with planning(shown) as tell:
        workload = load_script(script, tell)
        from steelyard import api

        planned = api.load_planned(
            path, workload, cluster=target, title=title(script), on_progress=tell
        )
        spans = planned.simulated()
    write_whole(trace, to_trace(spans, title=planned.plan.title).encode())
    if shown.json:
        show_json({"trace": str(trace), "ranks": [row.figures for row in by_rank(spans)]})
    else:
        for row in by_rank(spans):
            show_text(row.said)
    hint(f"written: {trace}; open it at https://ui.perfetto.dev", shown)
    return OK


@app.command
def scale(
    train: _Train,
    /,
    *,
    cluster: Annotated[
        str, Parameter(help="A declared cluster: a TOML file, or a name such as dgx-h100.")
    ],
    devices: Annotated[str, Parameter(help="Range of device counts: 16..1472.")],
    memory: Annotated[
        str | None,
        Parameter(help="Memory budget of a rank; by default the memory of its device."),
    ] = None,
    tokens: Annotated[
        str | None,
        Parameter(help="Tokens of the whole training, such as 300B, to predict hours and price."),
    ] = None,
    samples: Annotated[
        str | None, Parameter(help="Samples of the whole training, instead of tokens.")
    ] = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Compare steps on more and more devices with Amdahl's and Gustafson's laws; give hours and
    price.
    """
    from steelyard.plans.scaling_laws import check_devices
    from steelyard.report.output import show_scaling

    refuse_no_script(train, "scale")
    fewest, most = device_range(devices)
    length = training_length(tokens, samples)
    declared, budget = cluster_of(cluster, 1, None), Budget(memory)
    check_devices(declared, fewest, most)
    with planning(shown) as tell:
        workload = load_script(train, tell)
        from steelyard import api

        found = api.scale_workload(
            workload, cluster=declared, budget=budget,
            fewest=fewest, most=most, title=title(train), on_progress=tell, **length,
        )  # fmt: skip
    show_scaling(found, in_json=shown.json)
    return OK


@app.command
def explain(
    file: Annotated[Path, Parameter(help="The plan file, such as train.plan.toml.")],
    /,
    *,
    zoom: Annotated[Zoom, Parameter(help="Level of detail.")] = Zoom.RECEIPT,
    html: _Page = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Show a plan with its predictions and, after a run, its measurements; needs no torch."""
    with without_collection():
        from steelyard.plan_files.prediction_file import read_plan
        from steelyard.plans.receipt import Receipt
        from steelyard.report.document import tree_of
        from steelyard.report.output import show, show_decisions, write_page

    refuse_unwritable(html, _OTHER_PAGE)
    refuse_same_file("--html", html, file, explanation_of(file))
    found = read_plan(file)
    if found.plan is None:
        show_decisions(found, file, in_json=shown.json)
        return OK
    subject = Receipt(plan=found.plan, measured=found.measured) if found.measured else found.plan
    tree = tree_of(subject)
    show(tree, zoom=zoom, in_json=shown.json)
    write_page(tree, html)
    return OK


app.command(why)
app.command(export)


@app.command
def doctor(
    *,
    forget: Annotated[
        bool, Parameter(negative="", help="Delete measured costs: the next plan measures again.")
    ] = False,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Describe this machine and what it can do; exit code 2 if a problem prevents planning."""
    from steelyard.hardware.diagnosis import Verdict
    from steelyard.report.output import show_diagnosis

    with user_code("the diagnosis", RUN_FAILED, in_json=shown.json):
        from steelyard import api

        handle_interrupts()
        rows = api.doctor(forget=forget)
    show_diagnosis(rows, in_json=shown.json)
    return BAD_INPUT if any(row.verdict is Verdict.BAD for row in rows) else OK


@app.command
def demo(*, shown: OutputOptions = _DEFAULT_OUTPUT) -> int:
    """Show that plain PyTorch fails under a memory limit, and that a plan finishes under the same
    limit.
    """
    from steelyard.report.document import tree_of
    from steelyard.report.output import show, show_text

    out = sys.stderr if shown.json else sys.stdout
    with user_code("the demonstration", RUN_FAILED, in_json=shown.json):
        from steelyard import api

        handle_interrupts()
        ok, receipt = api.demo(lambda line: None if shown.quiet else show_text(line, stream=out))
    show(tree_of(receipt), in_json=shown.json)
    hint(
        "next: give your own script a workload(), then steelyard plan train.py --memory 2GiB", shown
    )
    return OK if ok else RUN_FAILED
