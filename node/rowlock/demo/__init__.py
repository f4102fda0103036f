"""The demonstration: a year of real flights, settled and paid by rowlock jobs, and checked.

The jobs in `rowlock.demo.jobs` are written against the public API only, as anybody would write
them; `rowlock.demo.reference` says independently what they must have done.
"""
