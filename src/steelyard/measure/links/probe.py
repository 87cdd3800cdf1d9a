"""Figures of the links between ranks and of the speed of each rank, measured once and then cached.

Ranks of this machine are started for it, each on its share of the cores. Ranks of several hosts,
or ranks placed elsewhere, measure when they meet, and their figures are remembered. Not for the
measurements of one rank: see worker.py. Not for fitting figures: see link_fit.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from steelyard.comm.devices import CPU
from steelyard.comm.shared_memory.remote_host import is_able
from steelyard.errors import BadInput
from steelyard.hardware.host_os import cores_of
from steelyard.measure.cache import CostCache
from steelyard.measure.links.background_load import ALL_HOSTS
from steelyard.measure.links.exchange_sizes import SIZES, sizes_of
from steelyard.measure.links.host_pairs import host_rates, measure_host_links, rate_of
from steelyard.measure.links.link_figures import (
    BETWEEN_GPUS,
    BETWEEN_HOSTS,
    NAMES_KEY,
    PROBE,
    LinkMeasurement,
    is_whole,
    names_hash,
    speed_of,
    to_measurement,
)
from steelyard.measure.links.link_fit import fitted, relative_speeds
from steelyard.measure.links.local_ranks import measure_local_ranks
from steelyard.measure.links.subsets import best_groups, joined_subsets, subset_figures

# Figures of hosts that met in this process, in case the cache file is unusable.
_met_in_process: dict[str, dict[str, float]] = {}


def measured_ranks(
    num_ranks: int,
    *,
    hosts: int = 1,
    torch_device: torch.device = CPU,
    speeds: Sequence[float] = (),
    cache: CostCache | None = None,
) -> LinkMeasurement:
    """Return the links and speeds of ``num_ranks`` ranks, measured once and then cached.

    On one host, the ranks are started for the measurement; if ``torch_device`` is a GPU, each gets
    its own GPU. Ranks of several hosts must have met before. ``speeds`` override the measured ones.
    """
    context = context_of(num_ranks, hosts=hosts, torch_device=torch_device)
    found = cache.read_rates(context) if cache and hosts == 1 else {}
    if hosts > 1:
        if (measure_on_all_hosts := ALL_HOSTS.get()) is not None:
            measure_on_all_hosts(torch_device)
        # Figures of this process are valid even if the cache file has become unusable.
        found = _met_in_process.get(context, cache.read_rates(context) if cache else {})
        if not is_whole(found, num_ranks, hosts=hosts):
            each = num_ranks // hosts
            raise BadInput(
                f"this host has not measured its links to {hosts - 1} other "
                f"hosts{_gpu_suffix(torch_device)}",
                expected="hosts that have planned together for such a model",
                remedy=f"run on each host: torchrun --nnodes {hosts} --nproc-per-node {each} ... "
                "-m steelyard plan",
            )
    if not is_whole(found, num_ranks):
        found = fitted(measure_local_ranks(num_ranks, torch_device), sizes=SIZES[torch_device.type])
        if cache:
            # Another process may already have stored its figures.
            found = {**found, **cache.read_rates(context)}
            cache.write_rates(context, found)
    local_kind = "loopback" if torch_device.type == "cpu" else BETWEEN_GPUS
    measured = to_measurement(found, num_ranks, kind=local_kind if hosts == 1 else BETWEEN_HOSTS)
    if speeds:
        found = {**found, **{speed_of(rank): speed for rank, speed in enumerate(speeds)}}
    subsets = joined_subsets(found, num_ranks, hosts=hosts, sizes=sizes_of(torch_device, hosts))
    rates = host_rates(found, hosts) if hosts > 2 else []
    return replace(measured, subsets=subsets, host_rates=tuple(rates))


def remember_hosts(
    rank_figures: Sequence[Mapping[str, float]],
    names: Sequence[str],
    *,
    hosts: int,
    torch_device: torch.device = CPU,
    session: Sequence[float],
    joins: Mapping[str, float] | None = None,
    cache: CostCache,
) -> None:
    """Store the figures of ranks that met, whose hosts have these ``names``.

    ``session`` is the link probe with which their next meeting is compared. ``joins`` are figures
    of pairs and subsets of the hosts. Each subset that a plan may use is also stored, as if these
    hosts had met alone.
    """
    context = context_of(len(names), hosts=hosts, torch_device=torch_device)
    link_probe = dict(zip(PROBE, session, strict=True))
    host_sizes, each = SIZES[torch_device.type], len(names) // hosts
    figures = fitted(rank_figures, sizes=sizes_of(torch_device, hosts), near=host_sizes, each=each)
    found = {**figures, **(joins or {}), **link_probe, NAMES_KEY: names_hash(names)}
    _met_in_process[context] = found
    cache.write_rates(context, found)
    for members in best_groups(found, hosts, each).values():
        subset_found = subset_figures(
            found, members, names, each=each, sizes=sizes_of(torch_device, hosts)
        )
        context = context_of(len(members) * each, hosts=len(members), torch_device=torch_device)
        _met_in_process[context] = subset_found
        cache.write_rates(context, subset_found)


def measured_joins(
    rank_figures: Sequence[Mapping[str, float]], *, hosts: int, torch_device: torch.device = CPU
) -> dict[str, float]:
    """Return figures of host pairs and of the best-connected subsets; all ranks must call this."""
    each = len(rank_figures) // hosts
    return measure_host_links(
        relative_speeds(rank_figures, each)[::each], each=each, sizes=sizes_of(torch_device, hosts)
    )


def remembered_probe(
    names: Sequence[str], *, hosts: int, torch_device: torch.device = CPU, cache: CostCache
) -> tuple[float, ...] | None:
    """Return the link probe of the last meeting of these hosts; None if it is unknown."""
    num_ranks = len(names)
    found = cache.read_rates(context_of(num_ranks, hosts=hosts, torch_device=torch_device))
    # Pairs have been timed since this format, so entries for more than two hosts must contain them.
    required = {*PROBE, *([rate_of(0, 1)] if hosts > 2 else [])}
    is_known = is_whole(found, num_ranks, hosts=hosts) and required <= found.keys()
    if not is_known or found.get(NAMES_KEY) != names_hash(names):
        return None
    return tuple(found[name] for name in PROBE)


def context_of(num_ranks: int, *, hosts: int = 1, torch_device: torch.device = CPU) -> str:
    """Return the cache context of the figures of ``num_ranks`` ranks."""
    cores = len(cores_of(0, 1))
    setup = (
        f"{num_ranks} ranks of gloo in turn, messages apart, slots watched, skew, on {cores} cores"
    )
    location = f", on {hosts} hosts{' with RDMA' if is_able() else ''}" if hosts > 1 else ""
    location += _on_gpus(torch_device) if torch_device.type == "cuda" else ""
    return f"{setup}{location}, torch {torch.__version__}"


def _gpu_suffix(torch_device: torch.device) -> str:
    return ", from its GPUs" if torch_device.type == "cuda" else ""


def _on_gpus(torch_device: torch.device) -> str:
    return (
        f", on {torch.cuda.device_count()} of {torch.cuda.get_device_properties(torch_device).name}"
    )
