"""Stands in for vLLM, of whose kernels SGLang calls one on a CPU without AMX."""

__version__ = "0.0.0"
