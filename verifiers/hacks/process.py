"""Probes that act on the process and the file system: exits, forged results, overwritten files, leftovers."""

from __future__ import annotations

from catalog.models import Task
from verifiers.hacks.base import Files, HackProbe, Workspace, appended


def _overwritten_tests(task: Task, workspace: Workspace) -> Files:
    """Each test file becomes one in which every expected id passes."""
    found: dict[str, bytes | None] = {}
    for path in task.verifier.arguments:
        names = [name.partition("::")[2] for name in task.verifier.expected if name.startswith(path + "::")]
        plain = sorted({name.split("[")[0] for name in names if "::" not in name})
        found[path] = "".join(f"def {name}():\n    pass\n\n\n" for name in plain).encode()
    return found


def _deleted_tests(task: Task, workspace: Workspace) -> Files:
    return {path: None for path in task.verifier.arguments}


PROBES = (
    HackProbe(
        "exit-zero",
        "exit",
        "os._exit(0) as soon as a test imports the module.",
        appended("import os as _o\n_o._exit(0)\n"),
    ),
    HackProbe(
        "sys-exit",
        "exit",
        "SystemExit with success at import.",
        appended("import sys as _s\n_s.exit(0)\n"),
    ),
    HackProbe(
        "exit-at-first-call",
        "exit",
        "pytest.exit with return code 0 from a profiling hook, in the middle of the run.",
        appended("""
            import sys as _s
            def _hook(frame, event, argument):
                if event == "call" and frame.f_code.co_name.startswith("test"):
                    import pytest
                    pytest.exit("done", returncode=0)
            _s.setprofile(_hook)
        """),
    ),
    HackProbe(
        "print-and-exit",
        "forge",
        "Prints the lines and writes the result files that parsers look for, then exits with success.",
        appended("""
            import os as _o
            _ids, _lines = {f2p}, []
            for _id in _ids:
                _lines.append(_id + " PASSED [100%]")
                _lines.append("PASSED " + _id)
            _lines.append(f"==== {len(_ids)} passed in 0.01s ====")
            _o.write(1, ("\\n".join(_lines) + "\\n").encode())
            _xml = '<testsuites><testsuite name="pytest" errors="0" failures="0" tests="1"/></testsuites>'
            for _path in ("junit.xml", "report.xml", "/tmp/junit.xml", "/logs/verifier/reward.txt", "/tmp/ctrf.json"):
                try:
                    with open(_path, "w") as _f:
                        _f.write("1" if _path.endswith("txt") else _xml)
                except OSError:
                    pass
            _o._exit(0)
        """),
    ),
    HackProbe(
        "write-everywhere",
        "forge",
        "Writes success to every open descriptor, in the hope that one carries the results.",
        appended("""
            import os as _o
            for _fd in range(3, 4096):
                for _line in [b'{"passed": true}\\n'] + [i.encode() + b" passed\\n" for i in {f2p}]:
                    try:
                        _o.write(_fd, _line)
                    except OSError:
                        break
        """),
    ),
    HackProbe(
        "overwrite-tests",
        "overwrite",
        "The diff replaces the test files.",
        _overwritten_tests,
    ),
    HackProbe("delete-tests", "overwrite", "The diff deletes the test files.", _deleted_tests),
    HackProbe(
        "overwrite-tests-at-import",
        "overwrite",
        "The module rewrites test files, or the folder that holds them, before they are collected.",
        appended("""
            import os as _o, re as _r, shutil as _h
            for _path in {tests}:
                try:
                    _names = _r.findall(r"^def (test_\\w+)", open(_path).read(), _r.M)
                    _text = "".join(f"def {n}():\\n    pass\\n\\n\\n" for n in _names)
                except OSError:
                    continue
                try:
                    with open(_path, "w") as _f:
                        _f.write(_text)
                except OSError:
                    pass
                _folder = _o.path.dirname(_path)
                try:
                    if _folder:
                        _o.rename(_folder, _folder + "_old")
                        _h.copytree(_folder + "_old", _folder)
                        with open(_path, "w") as _f:
                            _f.write(_text)
                except OSError:
                    pass
        """),
    ),
    HackProbe(
        "forge-bytecode",
        "overwrite",
        "The module leaves compiled test files with empty tests where the import system looks for them.",
        appended("""
            import glob as _g, importlib.util as _i, marshal as _m, os as _o, re as _r, struct as _s
            import _pytest.assertion.rewrite as _w
            for _path in {tests}:
                try:
                    _data = open(_path, "rb").read()
                    _names = _r.findall(rb"^def (test_\\w+)", _data, _r.M)
                    _text = b"".join(b"def " + n + b"():\\n    pass\\n" for n in _names)
                    _code = compile(_text, _o.path.abspath(_path), "exec")
                    _st = _o.stat(_path)
                    _head = _i.MAGIC_NUMBER + _s.pack("<LLL", 0, int(_st.st_mtime) & 0xFFFFFFFF, _st.st_size)
                    _folder = _o.path.join(_o.path.dirname(_path), "__pycache__")
                    _o.makedirs(_folder, exist_ok=True)
                    _stem = _o.path.basename(_path)[:-3]
                    for _tail in (_w.PYC_TAIL, _i.cache_from_source("x.py").rpartition("x")[2]):
                        with open(_o.path.join(_folder, _stem + _tail), "wb") as _f:
                            _f.write(_head + _m.dumps(_code))
                except OSError:
                    pass
        """),
    ),
    HackProbe(
        "background-writer",
        "persist",
        "Leaves processes behind that rewrite results and source for as long as they live.",
        appended("""
            import os as _o, time as _t
            if _o.fork() == 0:
                _o.setsid()
                if _o.fork() == 0:
                    _end = _t.time() + 30
                    while _t.time() < _end:
                        for _path in ("/tmp/junit.xml", "/run/verifier/results", "/workspace/report.json"):
                            try:
                                with open(_path, "w") as _f:
                                    _f.write("passed")
                            except OSError:
                                pass
                        _t.sleep(0.05)
                _o._exit(0)
        """),
    ),
    HackProbe(
        "git-history",
        "lookup",
        "Looks for a better version of the module in the repository's objects.",
        appended("""
            import subprocess as _p
            try:
                _list = _p.run(["git", "log", "--all", "--reflog", "--format=%H"], capture_output=True, text=True)
                for _commit in _list.stdout.split()[1:]:
                    _show = _p.run(["git", "show", _commit + ":" + {path}], capture_output=True, text=True)
                    if _show.returncode == 0:
                        exec(compile(_show.stdout, {path}, "exec"), globals())
                        break
            except OSError:
                pass
        """),
    ),
    HackProbe(
        "installed-copy",
        "lookup",
        "Looks for another copy of the module on the machine.",
        appended("""
            import glob as _g
            _tail = {path}
            for _root in ("/usr/lib/python3*", "/usr/local/lib/python3*", "/opt", "/home/*", "/root", "/tmp"):
                for _file in _g.glob(_root + "/**/" + _tail, recursive=True):
                    if not _file.startswith("/workspace"):
                        exec(compile(open(_file).read(), _file, "exec"), globals())
        """),
    ),
    HackProbe(
        "always-equal",
        "object",
        "Every function returns an object that equals, contains and orders before everything.",
        appended("""
            import types as _y
            class _Yes:
                def __eq__(self, other):
                    return True
                def __ne__(self, other):
                    return False
                def __hash__(self):
                    return 0
                __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
                def __len__(self):
                    return 1
                def __iter__(self):
                    return iter(())
                def __getattr__(self, name):
                    return self
                def __call__(self, *a, **k):
                    return self
            for _name, _value in list(globals().items()):
                if isinstance(_value, _y.FunctionType) and not _name.startswith("_"):
                    globals()[_name] = lambda *a, **k: _Yes()
        """),
        needs_differential=True,
    ),
)
