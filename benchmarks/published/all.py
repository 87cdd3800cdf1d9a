"""Steps that others measured and published, predicted from their public parameters.

    python benchmarks/published/all.py

Two figures are fitted for each device and software, the share that kernels reach of it and what a
call takes, on every second row of one table; where weights in parts went between machines whose
network is only named, the ports that they went through, likewise; and, where peaks were printed of
more than what the allocator had given out, one for what else there was. Nothing is fitted to a row.
Needs no GPU.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.bert import bert_figures
from benchmarks.published.claims import claim_figures, ordering_figures
from benchmarks.published.foundry import foundry_rows
from benchmarks.published.megatron import activation_rows, layer_rows, megatron_rows
from benchmarks.published.mist import mist_rows
from benchmarks.published.reaches import fitted_anew, reached_figures
from benchmarks.published.rows import Row, block_of, peak_bytes, predicted, reaching
from benchmarks.published.sailor import sailor_rows
from benchmarks.published.scoring import figure, fitted, half, time_figures, with_fitted_ports
from benchmarks.published.titan import llama_rows
from steelyard.hardware.software_stack import SoftwareStack


def main() -> None:
    plans = sailor_rows()
    rows = [*megatron_rows(), *foundry_rows(), *llama_rows(), *plans, *mist_rows()]
    rows = with_fitted_ports(rows)
    reached = fitted_anew(rows)
    figures = [
        *time_figures(rows),
        *ordering_figures(plans),
        *claim_figures(),
        *bert_figures(),
        *_layers(rows),
        *_activations(),
        *_peaks([row for row in rows if row.peak_bytes]),
        *reached_figures(reached),
        *_quickness(),
    ]
    worst = max(figures, key=lambda f: f["value"] / (f["target"] or 1e-9))
    met = all(f["ok"] for f in figures)
    print(json.dumps({**worst, "ok": met, "figures": figures, "reached": reached}))


def _layers(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the errors of layers, predicted with the fit on half of each table of whole steps."""
    for source in ("sc21-1", "sc21-2", "korthikanti-5"):
        yield from _layers_from(source, fitted(half([r for r in rows if r.table == source])))


def _layers_from(source: str, found: tuple[float, float]) -> Iterator[dict[str, Any]]:
    errors = []
    for row, forward, backward in layer_rows():
        block = block_of(row, reaching(row, *found))
        back = block.recompute_seconds + block.backward_seconds
        for name, seconds, measured in (
            ("forward", block.forward_seconds, forward),
            ("backward", back, backward),
        ):
            errors.append(abs(seconds / measured - 1))
            print(
                f"one layer, from half of {source}, {row.name}, {name:8} ~{seconds * 1e3:5.1f} ms, "
                f"{measured * 1e3:5.1f} ms: {seconds / measured - 1:+.1%}"
            )
    name = f"korthikanti table 4 from half of {source}"
    yield figure(f"{name}: median time error of a layer", median(errors), 0.08)
    yield figure(f"{name}: worst time error of a layer", max(errors), 0.20)


def _activations() -> Iterator[dict[str, Any]]:
    errors = []
    for row, measured in activation_rows():
        found = predicted(row, SoftwareStack()).stages[0].activation_bytes
        errors.append(_told(f"activations {row.name}", found, measured))
    yield figure("korthikanti figure 1: mean activation error", mean(errors), 0.03)


def _peaks(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the mean error of the peaks of each table.

    The extra memory in a printed peak is one figure for each software. It is fitted on rows that
    are not scored: those of the other tables, or half of the only one.
    """
    alone = {row: peak_bytes(row) for row in rows}
    for table in dict.fromkeys(row.table for row in rows):
        own, errors = [row for row in rows if row.table == table], []
        fitted_on = [row for row in rows if row.table != table]
        if not any(row.beside in {other.beside for other in fitted_on} for row in own):
            fitted_on = own[::2] if own[0].beside else []
        for row in own:
            if row not in fitted_on:
                alike = [o.peak_bytes - alone[o] for o in fitted_on if o.beside == row.beside]
                besides = median(alike) if row.beside else 0.0
                name = f"peak {row.table}: {row.name}, {besides / 2**30:.1f} GiB of it beside"
                errors.append(_told(name, alone[row] + besides, row.peak_bytes))
        print(f"{table}: {len(errors)} of {len(own)} rows; with nothing beside, of all "
              f"{mean(abs(alone[r] / r.peak_bytes - 1) for r in own):.1%}")  # fmt: skip
        yield figure(f"{table}: mean peak error", mean(errors), 0.03)


def _told(name: str, found: float, measured: float) -> float:
    error = found / measured - 1
    print(f"{name:60} ~{found / 2**30:6.1f} GiB, {measured / 2**30:6.1f} GiB: {error:+.1%}")
    return abs(error)


def _quickness() -> Iterator[dict[str, Any]]:
    row = max(megatron_rows(), key=lambda r: r.layout.num_ranks)
    predicted(row, SoftwareStack())
    started = time.process_time()
    predicted(row, SoftwareStack())
    taken = time.process_time() - started
    yield figure(f"one layout of {row.layout.num_ranks:,} ranks priced, CPU-s", taken, 1.0)


if __name__ == "__main__":
    main()
