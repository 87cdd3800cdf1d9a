"""The cluster of a step on a GPU of this machine: that GPU.

Not for which device that is: see measure/home.py.
"""

from dataclasses import replace

import torch

from steelyard.core.cluster import Cluster
from steelyard.core.device import Device
from steelyard.core.errors import BadInput
from steelyard.measure.cache import CostCache
from steelyard.measure.rates import with_measured_rates


def cluster_at(
    home: torch.device, cluster: Cluster, *, runner: str = "python", cache: CostCache
) -> Cluster:
    """``cluster``, where it is this machine and the step lies on a GPU of it: that GPU."""
    if home.type == "cpu" or not cluster.is_here:
        return cluster
    if cluster.num_devices > 1:
        raise BadInput(
            f"the model is on {home}, and {cluster.num_devices} ranks were asked for",
            expected="one rank, or a model on the CPU: ranks exchange what lies there, by gloo",
            remedy="plan one rank; steelyard.hooks sends gradients in codes between GPUs",
        )
    if cluster.far is not None:
        raise BadInput(
            f"the model is on {home}, and far memory was given",
            expected="a model on the CPU: what is moved to a file and back lies there",
            remedy="plan without far memory",
        )
    if runner != "python":
        raise BadInput(
            f"the model is on {home}, and its step is to be compiled by {runner}",
            expected="the python runner there: of what is compiled, kernels of a CPU are measured",
            remedy="leave runner= out, or write --runner python",
        )
    (member,) = cluster.tree.members
    gpu = with_measured_rates(_gpu(home, cluster.device), cache=cache, torch_device=home)
    return replace(cluster, tree=replace(cluster.tree, members=(replace(member, of=gpu),)))


def _gpu(home: torch.device, here: Device) -> Device:
    seen = torch.cuda.get_device_properties(home)
    return replace(here, kind=f"cuda {seen.name}", memory_bytes=int(seen.total_memory))
