"""The details of a plan for its page: tensors and schedule of the step that is run."""

import torch
from torch import nn

import steelyard as sy


def test_the_tensors_alive_add_up_before_and_after_the_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    batch = torch.randn(256, 64)
    planned = sy.plan(
        model, lambda model, batch: model(batch).square().mean(), batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        budget=sy.Budget(memory="800 KiB"),
    )  # fmt: skip
    assert planned.plan.decisions.rules
    detail = planned.detail()
    for history, prediction in (
        (detail.planned, planned.plan.predicted),
        (detail.unplanned, planned.plan.unplanned),
    ):
        assert history is not None
        assert history.timeline == prediction.timeline
        peak = history.timeline.nbytes.index(max(history.timeline.nbytes))
        alive = sum(one.tensor.nbytes for one in history.alive_at(peak))
        assert alive + prediction.peak.workspace_bytes == prediction.peak.nbytes
        assert any(one.is_saved for one in history.alive_at(peak))
    end = max(span.end_seconds for span in detail.spans)
    assert end > 0
    assert "(optimizer state)" in planned._repr_html_()
    assert "<script" not in planned._repr_html_()
