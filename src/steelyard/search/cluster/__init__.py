"""Plans for declared clusters: layouts of a deep model, stages, and what each block recomputes.

Not for ranks whose step is priced line by line: see ranks/.
"""
