"""Small broken checkpoints, the models they belong to (`models`), and the script that makes them (`build`)."""
