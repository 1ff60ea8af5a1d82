"""Machine code of the kernels, compiled for GPUs that are not there: `paracore kernels`.

`disassembly` reads machine code as text, `machine_code` gets that text and the compiler's figures out of a
binary, `compile` compiles one configuration, `worker` compiles many in child processes with a cache on disk,
`cuda` compiles the CUDA sources, and `report` holds the figures against the requirements and prints them.
"""
