"""Batch migration of old model zoos: ``ckptfix migrate``. The story is in ``migrating``.

places      where a zoo is: folders and URLs
items       what is in it: files that are checkpoints, alone or together, and others
naming      patterns of names, and the names of the outputs
zoo_toml    what is to be done with what; ``survey`` and ``drafting`` write the first one
planning    the jobs of a run
job         one of them, as plain data; ``performing`` does it, and says what is left to the user
engine      all jobs in processes of this machine, within the memory that ``resources`` counts; ``cluster`` on Ray
committing  outputs are put in place and written down in the ``manifest``, a journal in the ``workspace``"""
