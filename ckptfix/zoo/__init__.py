"""Batch migration of old model zoos: ``ckptfix migrate``. The story is in ``migrating``.

places      where a zoo is: folders and URLs
items       what is in it: listed, recognised, grouped; and the names of the outputs
table       what is to be done with what (``zoo.toml``), by patterns; ``drafting`` writes the first table
planning    the jobs of a run
work        one job, from the source to the staged output
engines     all jobs: processes of this machine or Ray, within the memory that ``resources`` counts
committing  outputs are put in place and written down in the ``manifest``, a ``journal`` of the ``workspace``
summary     how far it is, and how long the rest takes
"""
