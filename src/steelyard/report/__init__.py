"""Plans and receipts as text, JSON and HTML: one tree, several renderers; without torch.
Not for computing figures: every number shown was made elsewhere."""
