"""Callbacks of training frameworks that check every checkpoint when it is saved."""
