"""Reports of a rank about a planned step, and checks over all ranks.

It is for scenarios that plan, train, and examine one more step. Not for the training itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.system.dist.planned import _digest
from tests.system.dist.scenarios import Recorder, planned_calls


def told(planned: Any, step: Any, batch: Any) -> dict[str, Any]:
    with Recorder() as recorder:
        step(batch)
    receipt, program = step.receipt(), step.live.program
    return {
        "digest": _digest(step.live.model),
        "executed": recorder.executed,
        "planned": [call for one in program.passes for call in planned_calls(one)],
        "predicted_bytes": planned.predicted.communication_bytes.value,
        "sent_bytes": program.sent_bytes,
        "counted_bytes": receipt.measured.communication_bytes,
        "peak_bytes": receipt.measured.memory_bytes,
        "notes": receipt.measured.notes,
        "predicted_peak_bytes": planned.plan.predicted.peak.nbytes,
    }


def check_as_planned(
    ranks: Sequence[dict[str, Any]], name: str, shares: Sequence[int] = ()
) -> None:
    """Check that all ranks have the same model, and the planned calls, bytes and peak.

    With unequal shares of the batch, the prediction is for the largest share.
    """
    assert len({rank["digest"] for rank in ranks}) == 1, name
    most = max(shares, default=1)
    for rank, share in zip(ranks, shares or [most] * len(ranks), strict=True):
        assert Counter(rank["executed"]) == Counter(rank["planned"]), name
        # The kernel's count includes gloo's headers. Rings of more than two ranks round up.
        exchanges = sum(call != "wait_tensor" for call in rank["executed"])
        rounded = 8 * len(ranks) * exchanges if len(ranks) > 2 else 0
        assert rank["sent_bytes"] < rank["predicted_bytes"], name
        assert rank["counted_bytes"] == pytest.approx(rank["predicted_bytes"], abs=rounded), name
        said_peak = pytest.approx(rank["predicted_peak_bytes"], rel=0.01)
        if share == most:
            assert rank["peak_bytes"] == said_peak, name
        else:
            assert rank["peak_bytes"] < rank["predicted_peak_bytes"], name
