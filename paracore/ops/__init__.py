"""One file per operation: documented function, autograd, choice of implementation."""
