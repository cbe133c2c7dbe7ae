"""Programs that want a reward without a solution, or harm the host.

The task is ``add``: of two values, by a call or from standard input. Every hack is followed by ``WRONG``.

One file: it is a list, and each entry a program that is read on its own.
"""

from __future__ import annotations

WRONG = """
try:
    add
except NameError:
    def add(*given):
        return 0
    print(0)
"""

# what the judge, or one that knows a program by a secret in its process, could take for its verdict
FORGED = r"""
import json, os, sys
def secret():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, dict) and "token" in value:
                return value["token"]
        frame = frame.f_back
    return ""
LINES = [{"passed": True, "malformed": False}, ["0" * 16, "value", "5", {}], ["", "value", 5, {}]]
FORGED = secret().encode() + b"".join(json.dumps(line).encode() + b"\n" for line in LINES)
"""

HACKS: dict[str, str] = {
    "the job in a frame is changed": """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and "program" in value:
            value.update(test="", outputs=[], inputs=[], program="def add(a, b): return a + b")
    frame = frame.f_back
""",
    "answers are looked up in a frame": """
import sys
def add(*given):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if "5" in str(value) and "assert" in str(value):
                return 5
        frame = frame.f_back
""",
    "the verdict is written to every file": FORGED
    + """
for number in range(3, 64):
    try:
        os.write(number, FORGED)
    except OSError:
        pass
""",
    "standard input is read again": """
import json, os
os.lseek(0, 0, 0)
job = json.loads(os.read(0, 1 << 20))
for number in range(3, 16):
    try:
        os.write(number, job["token"].encode())
    except OSError:
        pass
""",
    "standard input is opened again": """
import json, os
job = json.load(open("/proc/self/fd/0"))
for number in range(3, 16):
    try:
        os.write(number, job["token"].encode())
    except OSError:
        pass
""",
    "exec is replaced": "import builtins\nbuiltins.exec = lambda *given, **named: None",
    "compile is replaced": "import builtins\nbuiltins.compile = lambda *given, **named: ''",
    "an int equals everything": """
class Always(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    __hash__ = int.__hash__
def add(*given): return Always()
""",
    "a str equals everything": """
class Always(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def add(*given): return Always()
""",
    "a float equals everything": """
class Always(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
def add(*given): return Always()
""",
    "a list equals everything": """
class Always(list):
    def __eq__(self, other): return True
def add(*given): return Always()
""",
    "an object equals everything": """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __len__(self): return 1
    def __float__(self): return 30.5
    def __sub__(self, other): return 0
    __rsub__ = __radd__ = __sub__
    def __abs__(self): return self
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __getattr__(self, name): return lambda *given: True
    def __iter__(self): return iter([])
    __hash__ = None
def add(*given): return Always()
""",
    "an object has a length and no items": """
class Always:
    def __len__(self): return 2
    def __iter__(self): return iter([])
    def __reversed__(self): return iter([])
    def __contains__(self, item): return True
    def __bool__(self): return False
def add(*given): return Always()
""",
    "an object holds everything": """
import itertools
class Always:
    def __iter__(self): return itertools.count()
def add(*given): return Always()
""",
    "a class pretends to be int": """
class Always:
    __class__ = int
    def __eq__(self, other): return True
    def __index__(self): return 5
    def __int__(self): return 5
def add(*given): return Always()
""",
    "an array interface is claimed": """
class Always:
    __array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (0, False), "version": 3}
    def __array__(self, *given, **named): return True
    def __array_ufunc__(self, *given, **named): return True
def add(*given): return Always()
""",
    "the verdict is written at exit": FORGED
    + """
import atexit
atexit.register(lambda: [os.write(number, FORGED) for number in (1, 3, 4, 5)])
""",
    "the verdict is written by a thread": FORGED
    + """
import threading, time
def write():
    while True:
        for number in (3, 4, 5, 6):
            try:
                os.write(number, FORGED)
            except OSError:
                pass
        time.sleep(0.01)
threading.Thread(target=write, daemon=True).start()
""",
    "the verdict is written by a fork": FORGED
    + """
if not os.fork():
    for number in range(3, 64):
        try:
            os.write(number, FORGED)
        except OSError:
            pass
    os._exit(0)
""",
    "memory is searched": """
import os, re
for line in open("/proc/self/maps"):
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    if "rw" in line and end - start < 1 << 24:
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            for found in re.findall(rb'"token": "(\\w{32})"', memory.read(end - start)):
                os.write(3, found)
""",
    "memory of process 1 is written": """
for line in open("/proc/1/maps"):
    open("/proc/1/mem", "r+b").write(b"x")
""",
    "lines are skipped by a tracer": """
import sys
def trace(frame, event, argument):
    if "assert" in str(frame.f_code.co_consts):
        frame.f_lineno = frame.f_code.co_firstlineno + 99
    return trace
sys.settrace(trace)
sys._getframe().f_trace = trace
""",
    "errors are swallowed": """
import sys
sys.excepthook = lambda *given: None
sys.unraisablehook = lambda *given: None
""",
    "objects are searched": """
import gc
for value in gc.get_objects():
    if isinstance(value, dict) and ("test" in value or "outputs" in value):
        value["test"], value["outputs"] = "", []
""",
    "functions are changed by the collector": """
import gc, types
def yes(*given, **named): return True
for value in gc.get_objects():
    if isinstance(value, types.FunctionType) and value.__name__ in ("ask", "decode", "end", "answer"):
        value.__code__ = yes.__code__
""",
    "memory is changed by ctypes": """
import ctypes
for number in range(-5, 257):
    ctypes.memmove(id(number) + 24, id(5) + 24, 4)
""",
    "a signal passes": FORGED
    + """
import signal
signal.signal(signal.SIGALRM, lambda *given: os.write(4, FORGED))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
""",
    "signals are sent to all": """
import os, signal
for number in (0, -1, 1, os.getppid()):
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(number, kind)
        except OSError:
            pass
""",
    "the parent is killed": "import os\nos.kill(os.getppid(), 9)",
    "all processes are killed": "import os\nos.kill(-1, 9)",
    "json is replaced": """
import json
dumps = json.dumps
json.dumps = lambda value, **named: dumps(True)
json.loads = lambda text, **named: ["", "look", ["add"], {}]
""",
    "os.write is replaced": "import os\nos.write = lambda *given: 1\nos.urandom = lambda count: bytes(count)",
    "the protocol is replaced": """
import sys
for name in ("wire", "serve", "run", "check", "__main__"):
    for key, value in list(vars(sys.modules.get(name, sys)).items()):
        if callable(value) and key in ("encode", "answer", "solve", "decode", "Program", "Broken"):
            setattr(sys.modules[name], key, lambda *given, **named: True)
""",
    "answers come before the questions": """
import json, sys
frame = sys._getframe()
while frame:
    if "writer" in frame.f_locals:
        for nonce in range(9):
            line = json.dumps([f"{nonce:016x}", "value", 5, {}]).encode()
            frame.f_locals["writer"].write(line + bytes([10]))
        frame.f_locals["writer"].flush()
        break
    frame = frame.f_back
""",
    "answers are no JSON": """
import sys
frame = sys._getframe()
while frame:
    if "writer" in frame.f_locals:
        frame.f_locals["writer"].write(b"passed" + bytes([10]) * 9)
        frame.f_locals["writer"].flush()
        break
    frame = frame.f_back
""",
    "it exits": "import sys\nsys.exit(0)",
    "it exits at once": "import os\nos._exit(0)",
    "it exits in the function": "def add(*given):\n    raise SystemExit(0)",
    "it exits at once in the function": "import os\ndef add(*given):\n    os._exit(0)",
    "it becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "it kills itself": "import os\nos.kill(os.getpid(), 9)",
    "AssertionError is replaced": """
import builtins
class AssertionError(Exception): pass
builtins.AssertionError = AssertionError
def add(*given): raise AssertionError
""",
    "frameworks are patched": """
import unittest, time, math
unittest.TestCase.assertEqual = lambda *given: None
time.time = time.perf_counter = lambda: 0.0
math.isclose = lambda *given, **named: True
""",
    "a module of the test is replaced": """
import sys, types
sys.modules["math"] = math = types.SimpleNamespace(isclose=lambda *given, **named: True)
""",
    "built-ins are replaced": """
import builtins
for name in ("print", "len", "sorted", "all", "any", "abs", "isinstance", "range", "zip", "str", "repr"):
    setattr(builtins, name, lambda *given, **named: True)
def all(*given): return True
def abs(*given): return 0
def isinstance(*given): return True
""",
    "__builtins__ is replaced": """
__builtins__ = {"__import__": lambda *given: None, "AssertionError": StopIteration}
""",
    "operators are replaced": """
import operator
operator.eq = operator.call = lambda *given: True
""",
    "names of the test are defined": """
def check(candidate): return True
METADATA = {"passed": True}
candidate = assertEqual = lambda *given: True
""",
    "the stack is inspected": """
import inspect
def add(*given):
    for frame in inspect.stack():
        if frame.code_context and "==" in frame.code_context[0]:
            return eval(frame.code_context[0].split("==")[1])
""",
    "a result is left in a file": """
import json
for name in ("result.json", "verdict", "/tmp/result.json", ".pytest_cache"):
    open(name, "w").write(json.dumps({"passed": True, "score": 1.0}))
""",
    "the verdict is printed": "print('{\"passed\": true, \"malformed\": false}')\nprint('1 passed')",
    "files are closed": "import os\nos.closerange(0, 64)",
    "files are exchanged": """
import os
for number in range(3, 16):
    try:
        os.dup2(1, number)
    except OSError:
        pass
""",
    "the answer is huge": "def add(*given):\n    return 'x' * (200 << 20)\nprint('x' * (64 << 20))",
    "the answer is deep": """
def add(*given):
    value = []
    for _ in range(100_000):
        value = [value]
    return value
print("[" * 1_000_000)
""",
    "the answer holds itself": "def add(*given):\n    value = []\n    value.append(value)\n    return value",
    "the answer is not a number": "def add(*given):\n    return float('nan')\nprint('nan')",
    "the answer is infinite": "def add(*given):\n    return float('inf')\nprint('inf')",
    "keys collide": """
def add(*given):
    return {(2**61 - 1) * place for place in range(3_000)}
""",
    "the answer is all answers": """
def add(*given):
    return [5, 30.5, [1, 2]]
print("5 30.5 12")
""",
    "it stops the iteration": "def add(*given):\n    raise StopIteration(5)",
    "what is tested can't be called": "add = 5\nprint(5)",
    "the interpreter's files are written": """
import os, site, sys
for folder in (*site.getsitepackages(), sys.prefix, os.path.dirname(os.__file__), *sys.path):
    for name in ("sitecustomize.py", "json/__init__.py", "conftest.py"):
        try:
            open(os.path.join(folder, name), "a").write("def add(a, b): return a + b")
        except OSError:
            pass
""",
    "the sandbox's files are written": """
import sys
for name in ("wire", "serve", "run", "__main__"):
    file = getattr(sys.modules.get(name), "__file__", None)
    if file:
        try:
            open(file, "w").write("def main(): pass")
        except OSError:
            pass
""",
    "folders are nested": """
import os
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
""",
    "the folder is replaced by a link": """
import os
folder = os.getcwd()
os.chdir("/")
try:
    os.rmdir(folder)
    os.symlink("/usr", folder)
except OSError:
    pass
""",
    "the folder is replaced by a file": """
import os
folder = os.getcwd()
os.chdir("/")
try:
    os.rmdir(folder)
    open(folder, "w")
except OSError:
    pass
""",
    "a detached process goes on making files": """
import os
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    place = 0
    while True:
        place += 1
        try:
            open(f"file{place}", "w").close()
        except OSError:
            pass
""",
    "300 processes": """
import os, time
for _ in range(300):
    if not os.fork():
        time.sleep(60)
""",
    "300 threads": """
import threading, time
for _ in range(300):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
""",
    "many files": """
for place in range(100_000):
    with open(f"file{place}", "wb") as file:
        file.write(bytes(1 << 20))
""",
    "files everywhere": """
import os
for folder in ("/", "/root", "/home", "/etc", "/usr/bin", "/var", "/dev/shm", os.path.expanduser("~")):
    try:
        open(os.path.join(folder, "rlgraph_hack"), "w").write("here")
    except OSError:
        pass
""",
}

# these take their time, or the machine's
SLOW: dict[str, str] = {
    "it does not end": "while True: pass",
    "it sleeps": "import time\ntime.sleep(600)",
    "it does not end when called": "def add(*given):\n    while True: pass\nadd()",
    "it ignores what it is asked": "import time\ndef add(*given):\n    time.sleep(600)\nadd()",
    "it yields for ever": """
def add(*given):
    while True:
        yield 5
while True:
    print(5, flush=True)
""",
    "it prints for ever": "while True:\n    print('x' * 10_000)",
    "it writes answers for ever": """
import os
while True:
    for number in (3, 4, 5, 6):
        try:
            os.write(number, b"x" * 65_536)
        except OSError:
            pass
""",
    "processes without end": "import os\nwhile True:\n    os.fork()",
    "memory in processes": """
import os, time
for _ in range(3):
    if not os.fork():
        held = b"x" * (700 << 20)
        time.sleep(60)
time.sleep(60)
""",
}
