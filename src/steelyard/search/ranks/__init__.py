"""Plans for several ranks: the parallel layout of the step, and the gradient communication.

Not for what one rank's program trades: see single/.
"""
