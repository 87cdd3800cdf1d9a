"""What this machine is and can do, for ``steelyard doctor``.

Not for finding that out: see measure/.
"""

from steelyard.core.doctor import Row
from steelyard.measure.doctor import diagnose


def doctor() -> tuple[Row, ...]:
    return diagnose()
