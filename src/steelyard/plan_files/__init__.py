"""Plans on disk: decisions as TOML, predictions and measurements as JSON beside them.

Not for what a plan is: see plans/. Not for the tables of a trade's rules: see trades/.
"""
