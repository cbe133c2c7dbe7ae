"""The command line. This file is run before all else of it, click included."""

import gc

# New objects until garbage is looked for, 700 in Python 3.11. Those of imports and of a plan stay until the
# end: a check, which makes some 62,000, need not look at all.
YOUNG_OBJECTS = 100_000

gc.set_threshold(YOUNG_OBJECTS)
