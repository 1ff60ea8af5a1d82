"""Triton kernels and their launchers. They know tensors; they know no autograd and no process group."""
