"""The words every room shares, their algebra and their validation, in plain data without torch.
Not for anything that only one room uses, and not for decisions."""
