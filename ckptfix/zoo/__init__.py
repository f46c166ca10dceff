"""Batch migration of old model zoos: ``ckptfix migrate``. Start reading in ``migrating``.

places      where a zoo is: folders and URLs
items       its checkpoints, in one file or several, and its other files
naming      patterns of names, and the names of the outputs
zoo_toml    the table that says what to do with which files; ``survey`` and ``drafting`` write a first draft of it
planning    the jobs of a run
job         one job as plain data; ``performing`` does it, and lists the decisions left to the user
engine      runs jobs in processes of this machine, within the memory counted by ``resources``; ``cluster`` on Ray
committing  puts outputs in place and records them in the ``manifest``, a journal in the ``workspace``"""
