"""Plans for declared clusters: layouts of a deep model, stages, and the policy of each block.

Not for ranks whose step is priced line by line: see ranks/.
"""
