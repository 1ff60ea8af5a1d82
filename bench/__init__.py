"""Microbenchmarks and end-to-end benchmarks.

`measure` is the one measuring core, `case` what a benchmark must state, `runner` joins the two, and
`report` and `plot` print the outcome. `paracore bench CASE` runs it; `cases` lists the cases.
"""
