"""Plans and receipts as text, JSON and HTML, drawn by several renderers from one document tree,
without torch. Not for computing figures: every number shown is computed elsewhere.
"""
