"""What a captured step could not honour is refused by the name of the module that has it."""

from __future__ import annotations
