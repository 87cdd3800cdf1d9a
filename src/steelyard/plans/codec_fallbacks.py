"""The less lossy codecs that a step with compressed gradients may fall back to.

Not for falling back: see run/compression_fallback.py. Not for the codecs: see ir/gradient_codec.py.
"""

from collections.abc import Iterable, Sequence

from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import GradientCompression


def codec_fallbacks(rules: Sequence[Rule]) -> tuple[tuple[Rule, ...], ...]:
    """Return these rules, followed by variants with ever less lossy codecs, the last one without
    any.
    """
    variants = [tuple(rules)]
    while of_kind(variants[-1], GradientCompression):
        less_lossy = (
            rule.less_lossy if isinstance(rule, GradientCompression) else rule
            for rule in variants[-1]
        )
        variants.append(tuple(sorted(rule for rule in less_lossy if rule is not None)))
    return tuple(variants)


def warm_up_of(rules: Iterable[Rule]) -> int:
    """Return the number of warm-up steps without compression."""
    return max((rule.warm_up for rule in of_kind(rules, GradientCompression)), default=0)
