"""The forward test: the model runs on the very file that is to be delivered, in a process of its own.

``run`` tells the story; ``launch`` starts the other process, which executes ``child``; ``exam`` is the work that it
does there: ``forward`` runs the model once, ``reference`` compares with other devices and files."""
