"""Checkpoints: the state of a run in safetensors and JSON, written completely or not at all.

Not for when one is written: see run/train_loop.py.
"""
