"""Files that launch a plan: for torchrun, Slurm, Kubeflow Trainer and SkyPilot.

They run ``steelyard run``, so that the plan itself is trained. Not for the nearest settings of
other tools: see settings.py.
"""

from collections.abc import Callable, Mapping

from steelyard.export.job import Job
from steelyard.export.yaml_text import YamlValue, to_yaml
from steelyard.plans.plan import Decisions

_PORT = 29500
_TOKEN = "STEELYARD_TOKEN"
# The names of accelerators in SkyPilot's catalogs, where they differ from those of the presets.
_SKYPILOT_NAMES = {
    "A100-SXM4-40GB": "A100", "A100-SXM4-80GB": "A100-80GB", "H100-SXM5": "H100",
    "H100-PCIe": "H100", "H200-SXM5": "H200", "V100-SXM2-16GB": "V100",
    "V100-SXM2-32GB": "V100-32GB", "GH200-96GB": "GH200", "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090", "RTX-A6000": "RTXA6000",
}  # fmt: skip


def torchrun(job: Job) -> str:
    """Return a shell script to be started on each node."""
    lines = [*_head(job)]
    if job.nodes > 1:
        lines += [
            "# Start it on each node with NODE_RANK=0, 1, ... and the address of the first node:",
            "#   NODE_RANK=0 MASTER_ADDR=alpha bash THIS_FILE --steps 500",
        ]
    lines += ["set -euo pipefail", *_token_check(job)]
    own = _meeting(job, rank='"$NODE_RANK"', address='"$MASTER_ADDR"')
    lines.append(f'{own} {job.shell_arguments} "$@"')
    return "\n".join(lines) + "\n"


def slurm(job: Job) -> str:
    """Return a batch script for ``sbatch``."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
    ]
    if job.is_on_gpus:
        options.append(f"--gpus-per-node={job.processes}")
    if job.host_mib is not None:
        options.append(f"--mem={job.host_mib}M")
    first, *rest = _head(job)
    lines = [first, *(f"#SBATCH {option}" for option in options), *rest]
    lines += ["set -euo pipefail", *_token_check(job)]
    if job.nodes == 1:
        lines.append(f'{_meeting(job, rank="", address="")} {job.shell_arguments} "$@"')
        return "\n".join(lines) + "\n"
    lines += [
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_ADDR",
        "# One task on each node starts the ranks of that node, which bind themselves to cores.",
        "# shellcheck disable=SC2016",
        "srun --cpu-bind=none bash -c '"
        + _meeting(job, rank='"$SLURM_NODEID"', address='"$MASTER_ADDR"')
        + ' "$@"\' '
        + f'steelyard {job.shell_arguments} "$@"',
    ]
    return "\n".join(lines) + "\n"


def kubeflow(job: Job) -> str:
    """Return a TrainJob of Kubeflow Trainer 2."""
    resources: dict[str, YamlValue] = {}
    if job.is_on_gpus:
        resources["nvidia.com/gpu"] = job.processes
    if job.host_mib is not None:
        resources["memory"] = f"{job.host_mib}Mi"
    trainer: dict[str, YamlValue] = {
        "image": "IMAGE",
        "numNodes": job.nodes,
        # Steelyard starts the ranks of one machine itself.
        "numProcPerNode": job.processes if job.nodes > 1 else 1,
        "command": ["torchrun" if job.nodes > 1 else "python", "-m", "steelyard"],
        "args": list(job.arguments),
    }
    if resources:
        trainer["resourcesPerNode"] = {"requests": resources, "limits": dict(resources)}
    if job.nodes > 1:
        secret: Mapping[str, YamlValue] = {"name": "steelyard-token", "key": "token"}
        trainer["env"] = [{"name": _TOKEN, "valueFrom": {"secretKeyRef": secret}}]
    document: dict[str, YamlValue] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }
    comment = (*job.described(), "IMAGE needs torch, Steelyard, the script and the plan.")
    return to_yaml(document, comment=comment)


def skypilot(job: Job) -> str:
    """Return a task for ``sky launch``."""
    resources: dict[str, YamlValue] = {}
    if job.is_on_gpus and job.gpu:
        name = _SKYPILOT_NAMES.get(job.gpu, job.gpu)
        resources["accelerators"] = f"{name}:{job.processes}"
    if job.host_mib is not None:
        # In GB, and at least as much.
        resources["memory"] = f"{-(-job.host_mib // 953)}+"
    document: dict[str, YamlValue] = {"name": job.name, "num_nodes": job.nodes, "workdir": "."}
    if resources:
        document["resources"] = resources
    if job.nodes > 1:
        document["secrets"] = {_TOKEN: None}
    document["setup"] = "python -c 'import steelyard'  # or install torch and Steelyard here\n"
    own = _meeting(
        job,
        rank='"$SKYPILOT_NODE_RANK"',
        address='"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"',
    )
    document["run"] = f"{own} {job.shell_arguments}\n"
    return to_yaml(document, comment=job.described())


LAUNCHERS: dict[str, Callable[[Job], str]] = {
    "torchrun": torchrun, "slurm": slurm, "kubeflow": kubeflow, "skypilot": skypilot,
}  # fmt: skip


def lost_at_launch(decisions: Decisions) -> tuple[str, ...]:
    """Return what a launch file does not say about the plan; it trains by the plan itself."""
    if not decisions.used_ranks:
        return ()
    ranks = ", ".join(map(str, decisions.used_ranks[:8]))
    return (f"the choice of ranks {ranks}: start the file on the hosts of these ranks",)


def _head(job: Job) -> tuple[str, ...]:
    return ("#!/usr/bin/env bash", *(f"# {line}" for line in job.described()))


def _token_check(job: Job) -> tuple[str, ...]:
    if job.nodes == 1:
        return ()
    return (f': "${{{_TOKEN}:?set one secret for all nodes, see the docs on security}}"',)


def _meeting(job: Job, *, rank: str, address: str) -> str:
    """Return the command that starts the ranks of one node, up to the arguments of Steelyard."""
    if job.nodes == 1:
        # Steelyard starts the ranks of one machine itself.
        return "python -m steelyard"
    return (
        f"torchrun --nnodes {job.nodes} --node-rank {rank} --nproc-per-node {job.processes} "
        f"--master-addr {address} --master-port {_PORT} -m steelyard"
    )
