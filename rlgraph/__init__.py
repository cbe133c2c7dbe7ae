"""rlgraph: a compiler for reinforcement-learning post-training of language models."""

__version__ = "0.1.0"

# behind the version, which they read; `diff` is the function here, `from rlgraph.diff import ...` the module
from rlgraph.api import Algorithm, Difference, Planned, Run, diff, load

__all__ = ["Algorithm", "Difference", "Planned", "Run", "__version__", "diff", "load"]
