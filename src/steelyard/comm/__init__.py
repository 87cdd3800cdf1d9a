"""Communication among live ranks: process groups, transports and known backend bugs.

Not for the choice of collectives: see passes/.
"""
