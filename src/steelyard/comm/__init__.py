"""Communication among live ranks: process groups, transports and what is known of their faults.

Not for which collectives a plan needs: see passes/.
"""
