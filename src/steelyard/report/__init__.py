"""Plans and receipts as text, JSON and HTML: one document tree, several renderers; without torch.
Not for computing figures: every number shown is computed elsewhere."""
