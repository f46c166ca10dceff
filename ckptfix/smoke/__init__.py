"""The forward test: runs the model with the file that is about to be delivered, in a process of its own.

Start reading in ``run``. ``launch`` starts the other process, which executes ``child`` and there ``exam``: ``forward``
runs the model once, ``reference`` compares with other devices and files."""
