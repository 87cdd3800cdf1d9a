"""Planned steps inside the training loops of other libraries, one module for each library.

    from steelyard.integrations.transformers import PlannedTrainer

The library keeps its optimizer, scheduler, clipping, logging and checkpoints; only forward and
backward pass are the plan's. ``import steelyard`` imports nothing from here. Not for a loop that
the user wrote: see ``step.backward`` in api/step.py.
"""
