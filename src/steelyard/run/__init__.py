"""Run a plan on a live model: the training step, its runners, checkpoints and launcher.

Not for decisions: a setting that the plan leaves open is an error here.
"""
