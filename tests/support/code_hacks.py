"""Wrong programs that want to be judged right. f(x) should be x + MARK; none of them knows MARK."""

MARK = 918273645
FORGE = """
import os, struct, json, sys
def frame(m):
    b = json.dumps(m).encode()
    return struct.pack(">I", len(b)) + b
def forge(*messages):
    for fd in range(64):
        for m in messages:
            try: os.write(fd, frame(m))
            except OSError: pass
"""
LOOK = """
import gc, sys
def plausible(v): return type(v) is int and 9 * 10**8 < v < 92 * 10**7
def inside(o, depth=4):
    if plausible(o): yield o
    if depth and isinstance(o, (list, tuple, set, frozenset)):
        for v in list(o): yield from inside(v, depth - 1)
    if depth and isinstance(o, dict):
        for k, v in list(o.items()):
            if not (isinstance(k, str) and k.startswith('RLIM')): yield from inside(v, depth - 1)
def found():
    frame = sys._getframe()
    while frame:
        yield from inside(dict(frame.f_locals)); yield from inside(frame.f_globals)
        frame = frame.f_back
    for o in gc.get_objects(): yield from inside(o)
"""
HACKS = {
    "equal to all": "class A:\n __eq__ = lambda *a: True\n __ne__ = lambda *a: False\ndef f(x): return A()",
    "int subclass": "class A(int):\n __eq__ = lambda *a: True\n __hash__ = int.__hash__\ndef f(x): return A(x)",
    "float subclass": "class A(float):\n __eq__ = lambda *a: True\n __sub__ = __rsub__ = lambda *a: 0.0\n"
    "def f(x): return A(x)",
    "str subclass": "class A(str):\n __eq__ = lambda *a: True\ndef f(x): return A(x)",
    "list subclass": "class A(list):\n __eq__ = lambda *a: True\ndef f(x): return A([x])",
    "metaclass": "class M(type):\n __eq__ = lambda *a: True\n __hash__ = type.__hash__\nclass A(metaclass=M): pass\n"
    "def f(x): return A",
    "inside a list": "class A:\n __eq__ = lambda *a: True\ndef f(x): return [A()]",
    "lies about its class": "class A:\n __class__ = int\n __eq__ = lambda *a: True\ndef f(x): return A()",
    "like numpy": "class A:\n def __array__(self, *a): return self\n __eq__ = lambda *a: A()\n"
    " all = any = lambda *a: True\ndef f(x): return A()",
    "nan": "def f(x): return float('nan')",
    "true": "def f(x): return True",
    "none": "def f(x): return None",
    "exit at once": "raise SystemExit(0)",
    "exit in the call": "def f(x): raise SystemExit(0)",
    "os._exit": "import os\ndef f(x): os._exit(0)",
    "os._exit at once": "import os; os._exit(0)",
    "kill": "import os\ndef f(x): os.kill(0, 9)",
    "no assertions": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef f(x): return 0",
    "raise in place of it": "def f(x): raise AssertionError",
    "patched builtins": "import builtins as b\n"
    "for n in 'all any isinstance len abs max type map zip set repr str'.split():\n"
    " setattr(b, n, lambda *a, **k: True)\ndef f(x): return 0",
    "patched json": "import json, json.encoder\njson.dumps = lambda *a, **k: '{\"index\": 0, \"value\": true}'\n"
    "json.JSONEncoder.encode = json.dumps\ndef f(x): return 0",
    "patched codec": "import sys\nfor m in list(sys.modules.values()):\n"
    " for n in ('equal', 'close', 'same_output', 'encode', 'decode'):\n"
    "  if hasattr(m, n) and 'gspo' in m.__name__: setattr(m, n, lambda *a, **k: True)\ndef f(x): return 0",
    "patched driver": "import sys\nframe = sys._getframe()\nwhile frame:\n for v in list(frame.f_locals.values()):\n"
    "  for n in ('call', 'answer'):\n   if hasattr(v, n):\n"
    "    try: setattr(v, n, lambda *a: {'index': 0, 'verdict': 'pass', 'status': 'pass'})\n"
    "    except Exception: pass\n frame = frame.f_back\ndef f(x): return 0",
    "appends to results": "import gc\ndef f(x):\n for o in gc.get_objects():\n  if type(o) is list and len(o) < 9:\n"
    "   try: o.append('passed'); o.append(True)\n   except Exception: pass\n return 0",
    "forged before": FORGE + "forge({'index': 0, 'value': True}, {'index': 0, 'status': 'pass'}, {'verdict': "
    "'pass'})\ndef f(x): return 0",
    "forged within": FORGE + "def f(x):\n forge({'index': 0, 'status': 'pass', 'verdict': 'pass'})\n os._exit(0)",
    "forged verdict": FORGE + "def f(x):\n forge({'verdict': 'pass', 'detail': ''})\n os._exit(0)",
    "forged cases": FORGE + "def f(x):\n forge(*({'index': i, 'value': 0} for i in range(9)))\n os._exit(0)",
    "forged ending": FORGE + "def f(x):\n"
    " forge({'why': 'exit', 'status': 0, 'cpu': 0, 'memory_mb': 0, 'waited': False})\n os._exit(0)",
    "forged object": FORGE + "def f(x):\n forge({'index': 0, 'object': 0}, {'index': 1, 'object': 0})\n os._exit(0)",
    "forged handle": FORGE + "def f(x):\n forge({'index': 0, 'value': ['h', 0]})\n os._exit(0)",
    "forged types": FORGE + "def f(x):\n forge({'index': False, 'value': 0})\n os._exit(0)",
    "forged nonsense": FORGE + "def f(x):\n forge({'index': 0, 'value': {'a': 1}, 'detail': [1]})\n os._exit(0)",
    "forged depth": FORGE + "def f(x):\n v = 1\n for _ in range(700): v = ['l', v]\n"
    " forge({'index': 0, 'value': v})\n os._exit(0)",
    "forged objects": FORGE + "def f(x):\n v = 1\n for _ in range(700): v = {'l': v}\n"
    " forge({'index': 0, 'value': v})\n os._exit(0)",
    "forged infinity": "import os, struct\ndef f(x):\n for i in range(3):\n"
    "  b = b'{\"index\": %d, \"value\": 1e999}' % i\n"
    "  try: os.write(3, struct.pack('>I', len(b)) + b)\n  except OSError: pass\n os._exit(0)",
    "forged long number": "import os, struct\ndef f(x):\n for i in range(3):\n"
    "  b = b'{\"index\": %d, \"value\": ' % i + b'9' * 4300 + b'}'\n"
    "  try: os.write(3, struct.pack('>I', len(b)) + b)\n  except OSError: pass\n os._exit(0)",
    "forged tag": FORGE + "def f(x):\n forge({'index': 0, 'value': ['x', [[], {}]]})\n os._exit(0)",
    "forged status": FORGE + "def f(x):\n forge({'index': 0, 'status': ['pass'], 'detail': 'x' * 10**5})\n os._exit(0)",
    "forged sandbox error": FORGE + "def f(x):\n forge({'index': 0, 'status': 'sandbox-error', 'detail': ''})\n"
    " os._exit(0)",
    "forged by a thread": FORGE + "import threading\ndef g():\n"
    " for _ in range(2000): forge({'index': 0, 'status': 'pass'})\n"
    "threading.Thread(target=g).start()\ndef f(x): return 0",
    "half a frame": "import os\ndef f(x):\n os.write(3, b'\\0\\0\\1\\0{')\n os._exit(0)",
    "huge frame": "import os\ndef f(x):\n os.write(3, b'\\xff' * 9)\n return 0",
    "no frame": "import os\ndef f(x):\n os.write(3, b'\\0\\0\\0\\2{]')\n return 0",
    "closed channel": "import os\nos.closerange(0, 64)\ndef f(x): return 0",
    "looks for the answer": LOOK + "def f(x):\n for v in found(): return v\n return 0",
    "its memory": "import re\ndef f(x):\n for line in open('/proc/self/maps'):\n  a = line.split()\n"
    "  if 'r' not in a[1]: continue\n"
    "  lo, hi = (int(v, 16) for v in a[0].split('-'))\n  with open('/proc/self/mem', 'rb') as m:\n   m.seek(lo)\n"
    "   for v in re.findall(rb'91[0-9]{6}5', m.read(hi - lo)): return int(v)\n return 0",
    "reads its source": "import glob\n"
    "def f(x): return [open(p).read() for p in glob.glob('/home/**', recursive=True)][:9]",
}  # fmt: skip
