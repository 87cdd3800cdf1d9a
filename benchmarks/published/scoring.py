"""How well published steps are predicted: two figures from half a table, errors on the rest.

A third is the ports of a machine that weights in parts went through, where that is known of no
cluster.

Beside each error stands the naive one, from a constant efficiency. Not for what was published.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import mean, median
from typing import Any

from benchmarks.published.rows import Row, naive_seconds, predicted, reaching, through_ports

_SHARES = tuple(range(25, 101, 5))
_CALL_SECONDS = (2.5e-6, 5e-6, 10e-6, 20e-6, 30e-6, 40e-6, 50e-6, 60e-6)
_PORTS = (8, 4, 2, 1)
# Mean errors within this share of the least count as equally good.
_AS_GOOD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    row: Row
    seconds: float
    naive_seconds: float

    @property
    def error(self) -> float:
        return self.seconds / self.row.step_seconds - 1

    @property
    def naive_error(self) -> float:
        return self.naive_seconds / self.row.step_seconds - 1


def time_figures(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the errors of all tables, fitted on half of each table of the same family."""
    tables = _by_table(rows)
    for source, of_source in tables.items():
        if of_source[0].outside:
            continue
        used = half(of_source)
        found = fitted(used)
        print(f"from half of {source}: {found[0]:.0%} is reached, {found[1] * 1e6:g} us a call")
        for name, table in tables.items():
            if table[0].family == used[0].family:
                # In a table of one row, the naive guess needs the rows of the fit.
                alike = table if len(table) > 1 else [*table, *used]
                seen = half(table) if table[0].fits_ports else used
                scored = [_scored(r, found, alike) for r in table if r not in seen]
                yield from _figures(f"{name} from half of {source}", scored)


def half(table: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of a table that are used for the fit."""
    return tuple(table[::2])


def with_fitted_ports(rows: Sequence[Row]) -> list[Row]:
    """Return all rows, with the number of ports fitted on half of each table.

    The share and the call seconds are those of the same half with all ports in use.
    """
    return [row for table in _by_table(rows).values() for row in _through_fitted(table)]


def _by_table(rows: Sequence[Row]) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    return tables


def _through_fitted(table: Sequence[Row]) -> Sequence[Row]:
    if not table[0].fits_ports:
        return table
    found = fitted(half(table))

    def error(ports: int) -> float:
        return _mean_error([through_ports(row, ports) for row in half(table)], found)

    ports = min(_PORTS, key=error)
    print(f"from half of {table[0].table}: {ports} of a machine's ports are used")
    return [through_ports(row, ports) for row in table]


@cache
def fitted(rows: tuple[Row, ...]) -> tuple[float, float]:
    """Return the share and the seconds of a call with the least mean error of these rows.

    With one row, only the share is fitted. Rows of large kernels hardly depend on the seconds of a
    call, so of equally good figures, those with a call nearest to the declared one are chosen.
    """
    calls = _CALL_SECONDS if len(rows) > 1 else (rows[0].cluster.device.call_seconds,)
    percent, _ = _best(rows, _SHARES, calls)
    percent, call_seconds = _best(rows, range(percent - 4, min(percent + 5, 101)), calls)
    return percent / 100, call_seconds


def _best(
    rows: tuple[Row, ...], percents: Sequence[int], calls: Sequence[float]
) -> tuple[int, float]:
    declared = rows[0].cluster.device.call_seconds
    errors = {
        (percent, call): _mean_error(rows, (percent / 100, call))
        for percent, call in product(percents, calls)
    }
    as_good = (1 + _AS_GOOD) * min(errors.values())
    found = (pair for pair, error in errors.items() if error <= as_good)
    return min(found, key=lambda pair: (abs(pair[1] - declared), errors[pair]))


def _mean_error(rows: Sequence[Row], found: tuple[float, float]) -> float:
    times = (predicted(r, reaching(r, *found)).step_seconds / r.step_seconds for r in rows)
    return mean(abs(time - 1) for time in times)


def _scored(row: Row, found: tuple[float, float], table: Sequence[Row]) -> Scored:
    return Scored(
        row=row,
        seconds=predicted(row, reaching(row, *found)).step_seconds,
        naive_seconds=naive_seconds(row, table),
    )


def _figures(name: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
    for s in scored:
        print(
            f"  {s.row.table:13} {s.row.name:36} "
            f"~{s.seconds:7.2f} s, {s.row.step_seconds:7.2f} s: {s.error:+7.1%}  "
            f"naive {s.naive_error:+7.1%}"
        )
    errors = [abs(s.error) for s in scored]
    naive = mean(abs(s.naive_error) for s in scored)
    skill = mean(errors) / naive
    print(f"  median {median(errors):.1%}, worst {max(errors):.1%}, skill {skill:.2f}")
    return [
        figure(f"{name}: median time error", median(errors), 0.08),
        figure(f"{name}: worst time error", max(errors), 0.20),
        figure(f"{name}: skill", skill, 0.4 if naive > 0.12 else 1.0),
    ]


def figure(name: str, value: float, target: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "target": target, "ok": value <= target}
