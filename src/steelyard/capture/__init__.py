"""From a model, a loss and a batch to one data-flow graph of the whole training step.
Not for changing that graph, nor for timing anything in it."""
