"""A user's op in a file that can't be loaded."""

LIMIT = 1 / 0
