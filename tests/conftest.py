import os

from tests.interpreter import prepare_interpreter

# Before any test imports a kernel: triton.jit decides when it decorates.
prepare_interpreter(os.environ)
