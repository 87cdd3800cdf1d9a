"""The tensors that fill a device, and the effect of a plan on each. Not for pages: see ../page/."""
