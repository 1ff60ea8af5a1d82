"""Drop-in: our kernels, and any mesh, for models that exist already."""
