"""The export of a plan whose step is captured: settings within its budget, with their price.

Not for exports from a plan file alone, which need no torch: see export/target.py.
"""

from steelyard.comm.devices import torch_device_of
from steelyard.export.exported import Exported
from steelyard.export.job import job_of, nodes_of
from steelyard.export.target import (
    ExportTarget,
    configuration,
    launch_file,
    price_of,
    settings_for,
)
from steelyard.hardware.cluster import Cluster
from steelyard.planner.export.price import PricedSettings, formats_of, priced_settings
from steelyard.planner.session import PlanningSession
from steelyard.plans.plan import Plan


def exported_settings(
    plan: Plan,
    session: PlanningSession | None,
    target: ExportTarget,
    *,
    cluster: Cluster,
    name: str,
) -> Exported:
    """Return the settings of a tool that are nearest to the plan, priced if there is a session."""
    nodes = nodes_of(plan.decisions, cluster)
    if session is None:
        note = "peak and step of these settings are not predicted: the plan is for a cluster"
        wanted = settings_for(target, plan.decisions, nodes=nodes)
        found = PricedSettings(settings=wanted, price=None, notes=(note,))
    else:
        device = "cuda" if plan.decisions.target.declared else _device_of(session)
        wanted = settings_for(
            target, plan.decisions, formats=formats_of(session), device=device, nodes=nodes
        )
        found = priced_settings(session, plan.decisions, wanted)
    return configuration(
        target,
        plan.decisions,
        found.settings,
        name=name,
        price=found.price,
        plan_price=price_of(plan),
        notes=found.notes,
    )


def exported_launch(
    plan: Plan,
    session: PlanningSession | None,
    target: ExportTarget,
    *,
    cluster: Cluster,
    name: str,
    script: str,
    path: str,
) -> Exported:
    """Return the file that launches the plan, which is in the file ``path``."""
    job = job_of(
        plan.decisions,
        script=script,
        path=path,
        cluster=cluster,
        device=_device_of(session) if session is not None and cluster.is_here else "",
        price=price_of(plan),
    )
    return launch_file(target, job, name=name, price=price_of(plan))


def _device_of(session: PlanningSession) -> str:
    return torch_device_of(session.source.model).type
