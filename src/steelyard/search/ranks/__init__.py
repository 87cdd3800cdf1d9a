"""Plans for several ranks: the parallel layout of the step, and the gradient communication.

Not for the trades in the program of one rank: see single/.
"""
