"""Odd programs that are right."""

from __future__ import annotations

HONEST: dict[str, str] = {  # with add as a function
    "a lambda": "add = lambda a, b: a + b",
    "default arguments": "def add(a, b=1, *rest, **named):\n    return a + b",
    "a partial function": "from functools import partial\nimport operator\nadd = partial(operator.add)",
    "recursion": """
def add(a, b, depth=200):
    return add(a, b, depth - 1) if depth else a + b
""",
    "a class that is called": """
class Add:
    def __call__(self, a, b): return a + b
add = Add()
""",
    "a method": "class Sums:\n    def add(self, a, b): return a + b\nadd = Sums().add",
    "a subclass of int": """
class Number(int): pass
def add(a, b): return Number(a + b) if isinstance(a, int) and isinstance(b, int) else a + b
""",
    "a decorator and a cache": """
from functools import wraps
def loud(function):
    @wraps(function)
    def wrapper(*given):
        print("adding", given)
        return function(*given)
    return wrapper
@loud
def add(a, b): return a + b
""",
    "it prints, and sets a limit": """
import sys
sys.setrecursionlimit(10_000)
print("hello", end="")
def add(a, b): return a + b
""",
    "a main block": """
def add(a, b): return a + b
if __name__ == "__main__":
    print(add(1, 2))
""",
    "an enumeration": """
from enum import IntEnum
class Five(IntEnum):
    FIVE = 5
def add(a, b): return Five.FIVE if (a, b) == (2, 3) else a + b
""",
    "a match": """
def add(a, b):
    match a, b:
        case [x, y]:
            return x + y
""",
    "threads": """
import threading
def add(a, b):
    out = []
    thread = threading.Thread(target=lambda: out.append(a + b))
    thread.start()
    thread.join()
    return out[0]
""",
}

# a program, and what a test of it asserts
ODD: dict[str, tuple[str, str]] = {
    "a namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and type(f()) is tuple",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2",
        "p = P(1)\nassert (p.x, p.y) == (1, 2) and str(p) == 'P(x=1, y=2)'\n"
        "p.x = 7\nassert p.x == 7 and p is p and p == p and p != P(7)",
    ),
    "subclasses of plain types": (
        "from collections import Counter, OrderedDict, defaultdict\n"
        "def f(s): return Counter(s), OrderedDict(a=1), defaultdict(list, b=[2])",
        "assert f('aab') == ({'a': 2, 'b': 1}, {'a': 1}, {'b': [2]})",
    ),
    "types that it asks for": (
        """
import typing
from dataclasses import dataclass, fields
@dataclass
class P:
    next: "P | None"
    x: int = 3
def f():
    hints = typing.get_type_hints(P)
    return hints["x"] is int, fields(P)[1].type is int, P(None) == P(None)
""",
        "assert f() == (True, True, True)",
    ),
    "a generator": (
        "def f(n):\n    for x in range(n):\n        yield x, x * x",
        "assert list(f(3)) == [(0, 0), (1, 1), (2, 4)]\n"
        "assert next(f(1)) == (0, 0) and sum(1 for _ in f(9)) == 9",
    ),
    "sorting in place": (
        "def f(xs, seen):\n    xs.sort()\n    seen['n'] = len(xs)",
        "xs, seen = [3, 1, 2], {}\nassert f(xs, seen=seen) is None\n"
        "assert xs == [1, 2, 3] and seen == {'n': 3}",
    ),
    "floats": (
        "def f(x): return x / 3, 1e308 * 10, -0.0",
        "import math\nassert math.isclose(f(1)[0], 0.333, abs_tol=1e-3)\n"
        "assert f(1)[0] == 1 / 3 and f(1)[1] == math.inf",
    ),
    "unicode": (
        "def f(s): return s[::-1].upper() + '\\ud800\\0\\n'",
        "assert f('żółć…🙂') == '🙂…ĆŁÓŻ\\ud800\\0\\n'",
    ),
    "big integers": ("def f(n): return 7**n, -(7**n)", "assert f(9000) == (7**9000, -(7**9000))"),
    "bytes, sets, complex": (
        "def f(): return b'\\xff\\0', {1, (2, 3)}, frozenset({'a'}), 1j, None, {(1, 2): [True]}",
        "assert f() == (b'\\xff\\0', {1, (2, 3)}, frozenset({'a'}), 1j, None, {(1, 2): [True]})\n"
        "assert [*map(type, f())] == [bytes, set, frozenset, complex, type(None), dict]",
    ),
    "exceptions": (
        "class Empty(ValueError): pass\ndef f(x):\n    if not x: raise Empty('nothing', 3)\n    return {}[x]",
        "for x, kind, given in ((0, ValueError, ('nothing', 3)), (1, KeyError, (1,))):\n"
        "    try:\n        f(x)\n    except kind as error:\n        assert error.args == given\n"
        "    else:\n        assert False",
    ),
    "NumPy's numbers": (
        "import numpy as np\ndef f(xs): return np.mean(xs), np.int64(3), np.bool_(True), np.array(xs)",
        "assert f([1, 2])[:3] == (1.5, 3, True) and f([1, 2])[3].tolist() == [1, 2]",
    ),
    "a class with state": (
        """
class Stack:
    def __init__(self): self.items = []
    def push(self, x):
        self.items.append(x)
        return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def __iter__(self): return iter(self.items)
""",
        """
s = Stack()
assert not s
s.push(1).push("b")
assert len(s) == 2 and s[0] == 1 and "b" in s and list(s) == [1, "b"]
assert s.pop() == "b" and s.items == [1] and s.push(2) is s
""",
    ),
    "its own objects as arguments": (
        "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
        "def f(n): return n.v + (f(n.n) if n.n else 0)",
        "a = Node(1, Node(2, n=Node(3)))\nassert f(a) == 6 and a.n.n.v == 3 and a.n.n.n is None",
    ),
    "constants and closures": (
        "PI = 3\nNAMES = ['a', 'b']\ndef f(n): return lambda x: x + n",
        "assert PI == 3 and NAMES[1:] == ['b'] and f(2)(3) == 5",
    ),
    "a name of a built-in": ("def sum(a, b): return a * b", "assert sum(3, 4) == 12\nassert sum(2, 2) == 4"),
    "a module that the test forgot": ("import math\ndef f(): return 2.0", "assert math.isclose(f(), 2)"),
    "standard input at its end": (
        "import sys\nlines = sys.stdin.read()\ndef f(): return lines",
        "assert f() == ''",
    ),
    "keyword-only arguments": (
        "def f(*xs, sep=', '): return sep.join(xs)",
        "assert f('a', 'b', sep='-') == 'a-b'",
    ),
    "iterables as arguments": (
        "def f(*given): return [sorted(each) for each in given]",
        "from collections import deque\n"
        "assert f(range(2), map(abs, [-1]), {2: 3}.values(), deque([4])) == [[0, 1], [1], [3], [4]]\n"
        "assert f([range(2)]) == [[[0, 1]]]",
    ),
    "unittest": (
        "def f(x): return 2 * x",
        "import unittest\nclass F(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\n"
        "if __name__ == '__main__': unittest.main()",
    ),
    "a test that exits": ("def f(x): return 2 * x", "import sys\nassert f(2) == 4\nsys.exit(0)"),
    "a name and a docstring": (
        "def f(x):\n    'Double it.'",
        "assert f.__name__ == 'f' and f.__doc__ == 'Double it.'",
    ),
    "an operator of the test": (
        "def f(x): return [x]",
        "assert f(1) + f(2) == [1, 2] and 1 in f(1) and f(3)[0] < 4",
    ),
}

# a program, its input and its output
PRINTING: dict[str, tuple[str, str, str]] = {
    "loops of input": ("for _ in range(int(input())):\n    print(int(input()) * 2)", "2\n3\n4\n", "6\n8\n"),
    "all of the input": ("import sys\nprint(*sorted(sys.stdin.read().split()))", "b a\nc", "a b c"),
    "bytes of the input": (
        "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.readline().upper())",
        "ab\ncd\n",
        "AB",
    ),
    "the end of the input": (
        "try:\n    while True:\n        print(input(), end=' ')\nexcept EOFError:\n    pass",
        "a\nb",
        "a b",
    ),
    "print with end and sep": ("print(1, 2, sep=', ', end='\\n\\n')", "", "1, 2\n"),
    "floats": ("print(1 / 3)", "", "0.3333333"),
    "an early exit": ("print('yes')\nexit()", "", "yes"),
    "a thread for its stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def f(n): return f(n - 1) + 1 if n else 0\n"
        "threading.Thread(target=lambda: print(f(5000))).start()",
        "",
        "5000",
    ),
    "files of numbers": ("import os\nprint(sum(map(int, os.read(0, 99).split())))", "1 2 3", "6"),
    "open(0)": ("print(len(open(0).readlines()))", "a\nb\nc\n", "3"),
    "unicode": ("print(input()[::-1])", "żółć\n", "ćłóż"),
    "a file of its own": ("open('x', 'w').write(input())\nprint(open('x').read())", "a", "a"),
}
