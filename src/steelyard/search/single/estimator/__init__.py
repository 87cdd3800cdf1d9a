"""The estimator of the search: peak bytes and seconds of a set of choices, without a rewrite.

Not for choosing: see search/single/. Not for reported numbers: see predict/.
"""
