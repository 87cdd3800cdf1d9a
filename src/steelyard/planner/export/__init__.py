"""The price of exported settings, with a captured step.

Not for the settings: see export/ at the root of the package.
"""
