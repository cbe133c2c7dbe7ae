"""The program of a sandbox (``nodes/support/sandbox.py``): ``python -I -S nodes/sandboxed ROLE``.

It needs the standard library alone and is run by its path, without the package around it. So it makes its
folder a package of its own, ``sandboxed``, in which relative imports are found as they are in
``rlgraph.nodes.sandboxed``.
"""

import importlib
import sys
import types

folder = sys.path.pop(0)  # no import of the program may find this folder
package = types.ModuleType("sandboxed")
package.__path__ = [folder]
sys.modules[package.__name__] = package
importlib.import_module("sandboxed.start").start(role=sys.argv[1])
