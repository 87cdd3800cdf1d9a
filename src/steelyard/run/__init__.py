"""Runs a plan on a live model: the training step, its runners, checkpoints and launcher.

Not for decisions: if the plan leaves a setting open, this is an error here.
"""
