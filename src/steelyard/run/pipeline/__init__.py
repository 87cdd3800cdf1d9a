"""A live training step in pipeline stages.

Not for its price: see predict/pipeline/.
"""
