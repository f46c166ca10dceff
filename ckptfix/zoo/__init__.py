"""Batch migration of old model zoos: ``ckptfix migrate``. The story is in ``migrating``.

places      where a zoo lies: folders and URLs
items       what lies in it: listed, told by bytes, grouped; and the names of the outputs
table       what is to be done with what (``zoo.toml``): patterns and treatments; ``drafting`` writes the first table
catalogue   the items of a run, each with what an earlier run made of it
planning    the jobs of a run
work        one job, from the source to the staged output
engines     all jobs: processes of this machine or Ray, within a budget of memory
books       what is written down: manifest, journals, renames, and the workspace that they are in
summary     how far it is, and how long the rest takes (``effort``)
index       the tables of the driver that are as long as the zoo: on disk, and in memory a few pages of them
"""
