"""Nouns behind a count."""


def plural(noun: str, count: float) -> str:
    """Return a noun with its ``s`` unless there is one of it.

    Example:
        >>> plural("wave", 1), plural("wave", 2)
        ('wave', 'waves')
    """
    if count == 1:
        return noun
    return f"{noun}s"
