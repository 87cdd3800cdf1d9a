"""What a captured step could not honour is refused by the name of its module."""

from __future__ import annotations
