"""What rlgraph uses of SGLang, so that weights and memory can be tested where SGLang is not installed.

``launch_server`` starts a server of SGLang's rules (``tests/sglang/fake.py``) that has weights and a cache of
keys and values in its device's memory, under torch_memory_saver on a GPU, and generates nothing.
"""
