"""Batch migration of old model zoos: ``ckptfix migrate``. The story is in ``migrating``.

where       places (folders, URLs), workspace, workplace, staging
what        listing, sniffing, grouping; naming and renames for the outputs
how         table and patterns (``zoo.toml``), treatment; drafting writes the first table
one file    job, performing, fetching, treating, mirroring, hashing, fingerprint
all         planning, engines with worker and frames, budget, memory, summary
the books   record, journal, manifest, committing, proving, adopting, deciding, duplicates, versions
"""
