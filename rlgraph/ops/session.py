"""What an op keeps on its worker from call to call: conversations that go on, for one."""

from typing import Protocol


class Session(Protocol):
    """It ends with its worker, and no checkpoint has it (``Context.session``)."""

    def settle(self) -> None:
        """Leave serve engines alone until the op is called again: their weights change, or they move."""

    def close(self) -> None:
        """End, and free what it holds."""
