"""The forward test: the model runs on the very file that is to be delivered, in a process of its own.

``run`` tells the story; ``child`` is what the other process executes; ``exam`` is the work that it does there, and
``findings`` says in words what came of it.
"""
