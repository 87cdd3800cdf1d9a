"""The cluster of a step on GPUs: one GPU of this machine for each rank, and as many on other hosts.

Not for choosing the device: see measure/device_memory.py.
"""

import os
from dataclasses import replace

import torch

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.measure.cache import CostCache
from steelyard.measure.device_memory import check_is_own
from steelyard.measure.device_rates import with_measured_rates

# An environment variable that lets ranks share a GPU. Predicted times still assume one GPU for each
# rank.
MAY_SHARE = "STEELYARD_SHARE_GPU"


def local_cluster(
    torch_device: torch.device, cluster: Cluster, *, runner: str = "python", cache: CostCache
) -> Cluster:
    """Return ``cluster`` with GPUs instead of CPUs if it is this machine and ``torch_device`` is a
    GPU.
    """
    if torch_device.type == "cpu" or not cluster.is_here:
        return cluster
    if cluster.offload_memory is not None:
        raise BadInput(
            f"the model is on {torch_device}, but offload memory was given",
            expected="a model on the CPU: only CPU tensors can be offloaded to a file",
            remedy="plan without offload memory",
        )
    if runner != "python":
        raise BadInput(
            f"the model is on {torch_device}, but the runner is {runner}",
            expected="the python runner on GPUs: compiled kernels are measured on CPUs only",
            remedy="leave out runner=, or write --runner python",
        )
    check_is_own(torch_device)
    gpu_of_rank = _gpu(torch_device, cluster.fastest, ranks=cluster.ranks_of_a_host)
    gpu = with_measured_rates(gpu_of_rank, cache=cache, torch_device=torch_device)
    member = replace(cluster.tree.members[0], of=gpu, count=cluster.num_devices)
    on_gpus = replace(cluster, tree=replace(cluster.tree, members=(member,)), speeds=())
    return on_gpus.at_speeds(cluster.speeds) if cluster.speeds else on_gpus


def _gpu(torch_device: torch.device, here: Device, *, ranks: int) -> Device:
    seen, count = torch.cuda.get_device_properties(torch_device), torch.cuda.device_count()
    if ranks > count and not os.environ.get(MAY_SHARE):
        raise BadInput(
            f"the model is on {torch_device} and {ranks} ranks were requested, but torch sees "
            f"{count} GPU" + ("s" if count != 1 else ""),
            expected="a GPU for each rank, visible to all: ranks that share a GPU share its speed",
            remedy=f"plan for {count} ranks; or, to experiment without realistic times, set "
            f"{MAY_SHARE}=1",
        )
    sharers = -(-ranks // count)
    kind = f"cuda {seen.name}" + (f", shared by {sharers} ranks" if sharers > 1 else "")
    return replace(here, kind=kind, memory_bytes=int(seen.total_memory) // sharers)
