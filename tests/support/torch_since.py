"""A mark for tests that hold from some version of torch on. Not for what Steelyard refuses."""

import pytest
import torch

from steelyard.torch_version import minor_version


def torch_since(version: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skip a test under an older torch; ``reason`` names the change upstream."""
    return pytest.mark.skipif(minor_version(torch.__version__) < version, reason=reason)
