"""Checkpoints: the state of a run in safetensors and JSON, written completely or not at all.

Not for deciding when to write one: see run/train_loop.py.
"""
