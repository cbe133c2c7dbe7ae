"""Read by every Python process of an SGLang server on a CPU, before anything else.

torchvision comes as a CUDA build; the operators that it would register for shapes need a library that is not
here. SGLang imports it for image models alone.
"""

import sys
import types

NAME = "torchvision._meta_registrations"
sys.modules.setdefault(NAME, types.ModuleType(NAME))
