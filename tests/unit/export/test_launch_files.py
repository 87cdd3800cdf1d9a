"""Files that launch a plan: a shell accepts them, and they keep the schema of their scheduler."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from steelyard.export.exported import ExportPrice
from steelyard.export.job import Job, job_of
from steelyard.export.launch_files import LAUNCHERS, slurm, torchrun
from steelyard.export.target import ExportTarget, launch_file
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link
from steelyard.hardware.topology import LevelMember, TopologyLevel
from steelyard.ir.metrics import Estimate
from tests.unit.export.plans import CASES, DATA, MIB, PLAIN, decided

PRICE = ExportPrice(memory_bytes=Estimate.exactly(300 * MIB), step_seconds=Estimate.exactly(0.5))


def job(ranks: int = 1, hosts: int = 1, **asked: Any) -> Job:
    decisions = PLAIN
    if ranks > 1:
        decisions = decided(replace(DATA, ranks=ranks), ranks=ranks)
        decisions = replace(decisions, target=replace(decisions.target, hosts=hosts))
    settings = {"script": "train.py", "path": "train.plan.toml", "cluster": None, "device": "cpu"}
    return job_of(decisions, price=PRICE, **settings | asked)


def gpus(count: int, per_node: int) -> Cluster:
    device = Device(
        kind="H100-SXM5", flops_per_second=1e15, bytes_per_second=1e12, memory_bytes=80 * 2**30,
        usd_per_hour=2.5,
    )  # fmt: skip
    link = Link(kind="any", bytes_per_second=1e11, latency_seconds=1e-6)
    node = TopologyLevel(name="node", members=(LevelMember(of=device, count=per_node, link=link),))
    nodes = LevelMember(of=node, count=count // per_node, link=link)
    return Cluster(tree=TopologyLevel(name="all", members=(nodes,)))


JOBS = {
    "one rank": job(),
    "ranks of one machine": job(ranks=2),
    "several hosts": job(ranks=4, hosts=2),
    "gpus": job(ranks=16, cluster=gpus(16, 8), device=""),
    "unknown device": job(device=""),
    "odd names": job(script="my $train;.py", path="a b/Übung_2'.plan.toml"),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("make", [torchrun, slurm])
def test_a_shell_can_read_the_script(make: Any, name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    run = subprocess.run(
        [bash, "-n"], input=make(JOBS[name]), text=True, capture_output=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def started(tmp_path: Path, text: str, *, node: int = 0) -> str:
    """Run the script with programs that only say how they were called."""
    for name in ("torchrun", "python", "scontrol"):
        program = tmp_path / name
        said = "echo alpha" if name == "scontrol" else f'printf "%s|" {name} "$@"'
        program.write_text(f"#!/usr/bin/env bash\n{said}\n")
        program.chmod(stat.S_IRWXU)
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nshift\nexec "$@"\n')
    srun.chmod(stat.S_IRWXU)
    run = subprocess.run(
        ["bash", "-s", "--", "--steps", "3"],
        input=text, text=True, capture_output=True, check=False,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "STEELYARD_TOKEN": "secret",
            "NODE_RANK": str(node), "MASTER_ADDR": "alpha", "SLURM_NODEID": str(node),
            "SLURM_JOB_NODELIST": "alpha,beta",
        },
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("make", [torchrun, slurm])
def test_the_script_starts_the_plan(make: Any, tmp_path: Path) -> None:
    one = started(tmp_path, make(JOBS["odd names"]))
    assert one == ("python|-m|steelyard|run|my $train;.py|--plan|a b/Übung_2'.plan.toml|--steps|3|")
    several = started(tmp_path, make(JOBS["several hosts"]), node=1)
    assert several == (
        "torchrun|--nnodes|2|--node-rank|1|--nproc-per-node|2|--master-addr|alpha|"
        "--master-port|29500|-m|steelyard|run|train.py|--plan|train.plan.toml|--steps|3|"
    )


def test_several_nodes_need_a_secret(tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash"], input=torchrun(JOBS["several hosts"]), text=True, capture_output=True,
        env={"PATH": os.environ["PATH"]}, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "STEELYARD_TOKEN: set one secret for all nodes" in run.stderr


# The options of sbatch (Slurm 25.05, https://slurm.schedmd.com/sbatch.html) that are used here.
SBATCH = re.compile(
    r"--(job-name=[a-z0-9-]+|nodes=\d+|ntasks-per-node=\d+|gpus-per-node=\d+|mem=\d+M|exclusive)"
)


@pytest.mark.parametrize("name", JOBS)
def test_slurm_gets_options_that_it_has(name: str) -> None:
    lines = slurm(JOBS[name]).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == [f"#SBATCH {option}" for option in options]
    assert all(SBATCH.fullmatch(option) for option in options), options


def test_memory_and_gpus_are_asked_for_where_they_are_known() -> None:
    # Two processes with 300 MiB each, and 1 GiB for Python and its libraries in each.
    assert "#SBATCH --mem=2648M\n" in slurm(JOBS["ranks of one machine"])
    on_gpus = slurm(JOBS["gpus"])
    assert "#SBATCH --nodes=2\n" in on_gpus
    assert "#SBATCH --gpus-per-node=8\n" in on_gpus
    assert "--mem" not in on_gpus
    unknown = slurm(JOBS["unknown device"])
    assert "--mem" not in unknown
    assert "--gpus" not in unknown
    assert any("does not say whether it is for CPUs" in n for n in JOBS["unknown device"].notes())


def test_the_price_is_said_where_the_cluster_states_one() -> None:
    lines = JOBS["gpus"].described()
    assert lines[0].endswith("2 nodes with 8 processes each on H100-SXM5")
    # 16 x 2.50 USD/h x 0.5 s x 1,000 / 3,600 s.
    assert lines[-1] == "price: 40.00 USD/h for 16 devices, ~5.556 USD per 1,000 steps"
    assert "the price is not known: no cluster file states one" in JOBS["one rank"].notes()


STRICT = ConfigDict(extra="forbid", strict=True)
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[int, Field(ge=1)]


class Named(BaseModel):
    model_config = STRICT
    name: Label


class SecretKey(BaseModel):
    model_config = STRICT
    name: Label
    key: str


class ValueFrom(BaseModel):
    model_config = STRICT
    secretKeyRef: SecretKey


class EnvVar(BaseModel):
    model_config = STRICT
    name: str
    valueFrom: ValueFrom


Quantity = Annotated[str, Field(pattern=r"^\d+(Mi|Gi)?$")] | Count


class Resources(BaseModel):
    model_config = STRICT
    requests: dict[Literal["memory", "nvidia.com/gpu"], Quantity]
    limits: dict[Literal["memory", "nvidia.com/gpu"], Quantity]


class TrainerSpec(BaseModel):
    model_config = STRICT
    image: str
    numNodes: Count
    numProcPerNode: Count
    command: list[str]
    args: list[str]
    resourcesPerNode: Resources | None = None
    env: list[EnvVar] = []


class TrainJobSpec(BaseModel):
    model_config = STRICT
    runtimeRef: Named
    trainer: TrainerSpec


class TrainJob(BaseModel):
    """The part of Kubeflow Trainer 2.2's TrainJob that is written.

    https://github.com/kubeflow/trainer/blob/v2.2.0/pkg/apis/trainer/v1alpha1/trainjob_types.go
    """

    model_config = STRICT
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: Named
    spec: TrainJobSpec


class SkyResources(BaseModel):
    model_config = STRICT
    accelerators: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+:\d+$")] | None = None
    memory: Annotated[str, Field(pattern=r"^\d+\+$")] | None = None


class SkyTask(BaseModel):
    """The part of SkyPilot's task that is written.

    https://docs.skypilot.co/en/latest/reference/yaml-spec.html
    """

    model_config = STRICT
    name: Label
    num_nodes: Count
    workdir: str
    resources: SkyResources = SkyResources()
    secrets: dict[str, None] = {}
    setup: str
    run: str


@pytest.mark.parametrize("name", JOBS)
def test_kubeflow_gets_a_train_job(name: str) -> None:
    found = TrainJob.model_validate(yaml.safe_load(LAUNCHERS["kubeflow"](JOBS[name])))
    trainer, wanted = found.spec.trainer, JOBS[name]
    assert trainer.numNodes == wanted.nodes
    # Steelyard itself starts the ranks of one machine.
    several = wanted.nodes > 1
    assert trainer.numProcPerNode == (wanted.processes if several else 1)
    assert trainer.command[0] == ("torchrun" if several else "python")
    assert tuple(trainer.args) == wanted.arguments
    assert bool(trainer.env) == several
    if name == "gpus":
        assert trainer.resourcesPerNode is not None
        assert trainer.resourcesPerNode.limits == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize("name", JOBS)
def test_skypilot_gets_a_task_whose_commands_a_shell_can_read(name: str) -> None:
    found = SkyTask.model_validate(yaml.safe_load(LAUNCHERS["skypilot"](JOBS[name])))
    assert found.num_nodes == JOBS[name].nodes
    if name == "gpus":
        assert found.resources.accelerators == "H100:8"
    if name == "ranks of one machine":
        assert found.resources.memory == "3+"
    for text in (found.setup, found.run):
        run = subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, check=False
        )
        assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("target", [t for t in ExportTarget if t.is_launcher])
def test_a_launcher_loses_nothing_but_the_choice_of_ranks(target: ExportTarget) -> None:
    found = launch_file(target, JOBS["several hosts"], name="file", price=PRICE)
    assert found.settings is None
    assert found.lost == ()
    assert found.to_json()["predicted"] == {"memory_bytes": 300 * MIB, "step_seconds": 0.5}
    decisions = replace(CASES["data"], used_ranks=(0, 2))
    found = launch_file(
        target, replace(JOBS["one rank"], decisions=decisions), name="f", price=None
    )
    assert found.lost == ("the choice of ranks 0, 2: start the file on the hosts of these ranks",)
