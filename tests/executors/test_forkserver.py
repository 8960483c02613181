"""A forked harness behaves as under a plain interpreter: the same program is run both ways and compared."""

import os
import random
import subprocess
import sys

import pytest

from executors.harness_bench import collect, one

PROGRAMS = {
    "arguments, name and path": "import sys, os\nprint(sys.argv[1:], __name__, sys.path[0], __file__, sys.argv[0])",
    "exit code": "import sys\nprint('x')\nsys.exit(3)",
    "exit code past a byte": "import sys\nsys.exit(256 + 7)",
    "negative exit code": "import sys\nsys.exit(-1)",
    "exit message": "import sys\nsys.exit('no luck')",
    "exit None": "import sys\nsys.exit(None)",
    "exit True": "import sys\nsys.exit(True)",
    "exception": "def f():\n    raise ValueError('in f')\nf()",
    "chained exception": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "exception group": "raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])",
    "syntax error": "x = (",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\n1 / 0",
    "excepthook that fails": "import sys\nsys.excepthook = 3\nsys.exit(4)",
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'last')\nprint('body')",
    "atexit after an exception": "import atexit\natexit.register(print, 'bye')\nraise SystemExit(2)",
    "thread outlives main": "import threading, time\ndef f():\n    time.sleep(0.2)\n    print('thread')\n"
    "threading.Thread(target=f).start()\nprint('main')",
    "pool": "from concurrent.futures import ThreadPoolExecutor\np = ThreadPoolExecutor()\nf = p.submit(print, 'pool')",
    "os._exit": "import os, sys\nprint('kept', flush=True)\nos._exit(5)",
    "killed by itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os\nos.abort()",
    "Ctrl-C": "import os, signal, sys\nsys.stderr = open(os.devnull, 'w')\nprint('x')\nraise KeyboardInterrupt",
    "stdin": "import sys\nprint(repr(sys.stdin.read()))",
    "binary output": "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
    "stdout replaced": "import sys, io\nsys.stdout = io.StringIO()\nprint('lost')",
    "stdout closed": "import sys\nprint('kept')\nsys.stdout.close()",
    "annotations are objects": "def f(x: int) -> str: ...\nprint(f.__annotations__)",
    "pickle by __main__": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "globals": "print(sorted(k for k in globals() if not k.startswith('__')))",
    "modules beside it": "import helper\nprint(helper.VALUE)",
    "signals": "import signal\nprint([signal.getsignal(s) for s in (2, 10, 13, 15, 17)], signal.set_wakeup_fd(-1))",
    "asyncio": "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'hi')\n"
    "    return await p.wait()\nprint(asyncio.run(f()))",
    "processes": "import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n"
    "    with m.get_context('spawn').Pool(1) as p: print(p.map(f, [3]))",
    "child ignores no signal": "import subprocess\n"
    "print(subprocess.run(['sh', '-c', 'yes | head -n 1'], capture_output=True))",
    "random state": "import random\nprint(random.random() == random.Random(1).random())",
    "descriptors": "import os\nprint(sorted(f for f in os.listdir('/proc/self/fd') if int(f) < 3), "
    "len(os.listdir('/proc/self/fd')))",
}


def plain(command, cwd, stdin=""):
    env = {**os.environ, "NAME": "wörld"}
    return subprocess.run([sys.executable, *command], cwd=cwd, input=stdin.encode(), capture_output=True, env=env)


def same(found, expected):
    assert found.reason == ""
    status = found.exit_code if found.signal is None else -found.signal
    assert (status, found.stdout_tail, found.stderr_tail) == (
        expected.returncode,
        expected.stdout.decode("utf-8", "replace"),
        expected.stderr.decode("utf-8", "replace"),
    )


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_script_does_what_it_does_under_plain_python(bench, program):
    bench.write("helper.py", "VALUE = 17")
    found = bench.script(
        program, "one", "{field}", fields={"field": "two 'three' $x"}, stdin="words\nünder", preload=("json",)
    )
    same(found, plain([str(bench.root / "agent.py"), "one", "two 'three' $x"], bench.root, "words\nünder"))


def test_a_package_runs_as_module(bench):
    bench.write("pkg/__init__.py", "")
    bench.write("pkg/words.py", "WORD = 'word'")
    bench.write(
        "pkg/__main__.py",
        "import sys\nfrom .words import WORD\nprint(WORD, sys.argv, sys.path[0], __name__, __spec__.name)\n1 / 0",
    )
    found = bench.run("python", "-m", "pkg", "-v", "{n}", fields={"n": 3}, cwd=".")
    expected = plain(["-m", "pkg", "-v", "3"], bench.root)
    # Python's own frames of ``-m`` are in the traceback, with line numbers that may differ.
    assert (found.exit_code, found.stdout_tail) == (expected.returncode, expected.stdout.decode())
    assert found.stderr_tail.splitlines()[-1] == expected.stderr.decode().splitlines()[-1]
    assert "forkserver" not in found.stderr_tail


def test_code_on_the_command_line(bench):
    code = "import sys\nprint(sys.argv, repr(sys.path[0]), __name__)\nraise ValueError(1)"
    same(bench.run("python", "-c", code, "x"), plain(["-c", code, "x"], bench.root))


def test_interpreter_options_are_honoured(bench):
    bench.write("agent.py", "assert False\nprint('optimised')")
    assert bench.run("python", "-O", "agent.py").stdout_tail == "optimised\n"


def test_what_the_harness_forgot_to_close_is_written(bench):
    found = bench.script(
        "f = open('notes', 'w')\nf.write('kept')\n"
        "class A: pass\na = A()\na.file = open('more', 'wb')\na.file.write(b'too')"
    )
    assert found.exit_code == 0
    work = bench.root / "work" / "a1"
    assert ((work / "notes").read_text(), (work / "more").read_text()) == ("kept", "too")


def test_attempts_do_not_share_random_state(bench):
    bench.write("agent.py", "import random\nprint(random.random())")
    executor = bench.executor("python", "agent.py", preload=("random",))

    for i in range(3):
        bench.start(executor, f"a{i}")
    assert len({found.stdout_tail for found in collect(executor, 3)}) == 3


def test_preloads_are_imported_and_called_once(bench):
    bench.write("slow.py", "import os\nPID = os.getpid()\nCALLS = []\ndef warm():\n    CALLS.append(os.getpid())")
    bench.write("agent.py", "import os, slow\nprint(slow.PID == os.getppid(), slow.CALLS == [slow.PID])")
    assert bench.run("python", "agent.py", preload=("slow:warm",)).stdout_tail == "True True\n"


def test_a_preload_that_fails_costs_only_speed(bench):
    bench.write("bad.py", "raise RuntimeError('not today')")
    assert bench.script("print('ran')", preload=("bad", "json:nothing")).stdout_tail == "ran\n"


def test_our_own_modules_shadow_nothing(bench):
    """The server lies in a folder with `local.py`, `command.py`, …; a harness may have modules of these names."""
    bench.write("command.py", "WHOSE = 'harness'")
    bench.write("agent.py", "import command\nprint(command.WHOSE)")
    assert bench.run("python", "agent.py", preload=("command",)).stdout_tail == "harness\n"


def test_a_function_gets_the_fields_and_its_result_is_printed(bench):
    bench.write("mod.py", "def main(task):\n    print('hi')\n    return {'twice': task['n'] * 2, 'keys': sorted(task)}")
    found = bench.run(function="mod:main", fields={"n": 21, "deep": {"a": [1]}})
    assert (found.exit_code, found.stdout_tail) == (0, 'hi\n{"twice": 42, "keys": ["deep", "id", "n"]}\n')


@pytest.mark.parametrize(
    ("body", "status", "out"), [("return None", 0, ""), ("return 'text'", 0, "text\n"), ("raise SystemExit(9)", 9, "")]
)
def test_how_a_function_ends(bench, body, status, out):
    bench.write("mod.py", f"class K:\n    @staticmethod\n    def main(task):\n        {body}")
    found = bench.run(function="mod:K.main")
    assert (found.exit_code, found.stdout_tail) == (status, out)


def test_a_function_that_raises_shows_its_own_frames_only(bench):
    bench.write("mod.py", "def main(task):\n    raise LookupError('gone')")
    found = bench.run(function="mod:main")
    assert found.exit_code == 1
    assert "LookupError: gone" in found.stderr_tail
    assert "mod.py" in found.stderr_tail
    assert "forkserver" not in found.stderr_tail


def test_every_byte_of_the_environment_arrives(bench, monkeypatch):
    monkeypatch.setenv("ODD", os.fsdecode(b"\xff\xfe="))
    bench.write("agent.py", "import os\nprint(os.environb[b'ODD'], os.environ['A'], os.environ['OPENAI_BASE_URL'])")
    executor = bench.executor("python", "agent.py", env={"A": "harness", "OPENAI_BASE_URL": "elsewhere"})
    bench.start(executor, env={"OPENAI_BASE_URL": "gateway"})

    assert one(executor).stdout_tail == "b'\\xff\\xfe=' harness gateway\n"


def test_python_variables_of_the_run_file_reach_the_interpreter(bench):
    bench.write("lib/far.py", "X = 1")
    found = bench.script(
        "import far, sys\nprint(far.X, sys.flags.utf8_mode)",
        env={"PYTHONPATH": str(bench.root / "lib"), "PYTHONUTF8": "1"},
    )
    assert found.stdout_tail == "1 1\n"


def test_random_bytes_on_the_command_line(bench):
    rng = random.Random(0)
    text = "".join(chr(rng.choice([9, 10, 32, 34, 36, 39, 92, 96, 123, 125, 233, 0x1F600])) for _ in range(200))
    bench.write("agent.py", "import sys\nprint(ascii(sys.argv[1:]))")
    assert bench.run("python", "agent.py", "{q}", "{{x}}", "a{q}b", fields={"q": text}).stdout_tail == (
        ascii([text, "{x}", f"a{text}b"]) + "\n"
    )
