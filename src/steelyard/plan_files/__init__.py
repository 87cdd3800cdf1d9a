"""Plans on disk: decisions as TOML, and predictions and measurements as a JSON file next to it.

Not for the plan itself: see plans/. Not for the tables of a trade's rules: see trades/.
"""
