"""Predictions of training steps that others measured and published."""
