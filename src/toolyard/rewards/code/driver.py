"""The part of the harness that runs inside the sandbox, as text: plain Python without dependencies.

It runs for every case, so it is short and imports only the essentials. `names()`, what the answer may use without
importing it, is generated for each answer.
"""

from __future__ import annotations

_COMMON = """\
import json
import os
import sys


def harness(setup, answer, name):
    nonce, _, given = sys.stdin.buffer.read().partition(b"\\n")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    out = os.dup(1)
    write, leave, here = os.write, os._exit, harness.__code__.co_filename
    number, mine = os.getpid, os.getpid()

    def flush():
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass

    def say(word, text):
        if number() != mine:  # a fork of the answer's, in which its function returns as well
            leave(0)
        flush()
        data = b"\\n" + nonce + b" " + word + b" " + text.encode() + b"\\n"
        while data:
            data = data[write(out, data):]

    def show(error):
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == here:
            trace = trace.tb_next
        try:
            with open("answer.py", "w") as file:  # where the interpreter looks for the lines of a traceback
                file.write(answer)
        except Exception:
            pass
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)
        flush()

    module = type(sys)("answer")
    sys.modules["answer"] = module
    try:
        task = begin(given)
        module.__dict__.update(names())
        if setup:
            exec(compile(setup, "setup.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        say(b"task", json.dumps(f"{type(error).__name__}: {error}"))
        leave(1)
    say(b"ready", "0")
    try:
        exec(compile(answer, "answer.py", "exec", dont_inherit=True), module.__dict__)
        word, text, failure = finish(task, module, name, given)
    except SystemExit:
        raise
    except BaseException as error:
        show(error)
        leave(1)
    if failure is not None:
        show(failure)
    say(word, text)
    leave(0)
"""

CALL = f"""{_COMMON}

def begin(given):
    return json.loads(given)


def find(space, name):
    owner, _, name = name.rpartition(".")
    solution = space.get(owner or "Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    if callable(space.get(name)):
        return space[name]
    owners = {{one for one in space.values() if isinstance(one, type) and name in vars(one)}}
    if len(owners) == 1:
        return getattr(owners.pop()(), name)
    raise NameError(f"the program has {{'several methods' if owners else 'no function and no method'}} {{name!r}}")


def finish(arguments, module, name, given, dumps=json.dumps):
    value = find(module.__dict__, name)(*arguments)
    odd = []

    def plain(one):
        kind = type(one)
        if kind in (set, frozenset):
            try:
                return sorted(one)
            except TypeError:
                return list(one)
        if kind.__module__ == "numpy":
            return one.tolist()
        if kind.__name__ == "deque":
            return list(one)
        odd.append(repr(one)[:200])

    try:
        text = dumps(value, default=plain)
    except Exception as error:
        odd.append(f"{{type(value).__name__}}: {{error}}"[:200])
    return (b"odd", dumps(odd[0]), None) if odd else (b"returned", text, None)
"""
"""Call a function with the arguments read from stdin as JSON, and report what it returned."""

ASSERTS = f"""{_COMMON}

def begin(given):
    return compile(given.decode(), "test.py", "exec", dont_inherit=True)


def finish(test, module, name, given, dumps=json.dumps):
    # Tests below `if __name__ == "__main__":` are meant to run, and unittest.main() looks for them in that module.
    module.__name__ = "__main__"
    sys.modules["__main__"] = module
    try:
        exec(test, module.__dict__)
        return b"passed", "0", None
    except (AssertionError, SystemExit) as error:
        line, beyond = last_line(test, error.__traceback__)
        source = given.decode().replace("\\r\\n", "\\n").replace("\\r", "\\n").split("\\n")[line - 1].strip()
        message = str(error)
        if isinstance(error, SystemExit):
            if not leaves(source, beyond):
                raise
            if not error.code:
                if ran(beyond):
                    return b"passed", "0", None
                message = "every test was skipped"
        elif any(frame.f_globals is module.__dict__ for frame in beyond):
            raise
        return b"failed", dumps([line, source[:200], message[:500]]), error


# Where in the test it was, and the frames beyond that. Not by the file's name: an answer may call its own code so.
def last_line(test, trace):
    own, codes = set(), [test]
    for code in codes:  # grows while it is read
        own.add(id(code))
        codes += [one for one in code.co_consts if type(one) is type(test)]
    line, beyond = 0, []
    while trace is not None:
        if id(trace.tb_frame.f_code) in own:
            line, beyond = trace.tb_lineno, []
        else:
            beyond.append(trace.tb_frame)
        trace = trace.tb_next
    return line, beyond


# Whether the test itself ended the program, as unittest.main() does, and not a function of the answer that it called.
def leaves(source, beyond):
    there = any(word in source for word in ("exit", "quit", "SystemExit", "main("))
    return there and all(frame.f_globals.get("__name__") in ("unittest.main", "_sitebuiltins") for frame in beyond)


# Whether unittest.main() had a test that was not skipped.
def ran(beyond):
    results = [getattr(frame.f_locals.get("self"), "result", None) for frame in beyond]
    return all(result is None or result.testsRun > len(result.skipped) for result in results)
"""
"""Run the test code read from stdin, and report whether it passed."""
