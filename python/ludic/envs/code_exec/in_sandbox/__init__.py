"""The first process of a sandbox, which runs programs. It needs Python's standard library alone,
and imports only itself: a sandbox has no other file of this library.

It reads requests from its stdin and answers on its stdout, each a line of JSON. `process_sandbox`
has the command that starts it.

- `{"op": "compile", "code", "timeout_s"}` -> `{"compiled": {"status", "message", "line", ...}}`
- `{"op": "run", "code", "stdin", "timeout_s", "memory_mb", "env"}` -> `{"status", "stdout", ...}`;
  with `"compile_first": true` also `compiled`, and a program that is not valid does not run
- `{"op": "clean"}` -> `{"clean": true}`: kills the remaining processes, and deletes all files

Every answer says whether the program's files could be deleted (`clean`). With `"more": true` the
next request is of the same program, or `clean`; any other one is answered `{"again": true}`, and is
to be sent again.

This process forks a handler for the requests of one program, and the handler forks the program for
each test, so that the interpreter starts once. This process itself never reads a request or an
answer: no program finds another one, or its output, in the memory that it is a copy of; what it may
find are its own earlier tests' inputs and outputs. A program has none of the pipes, and
cannot signal, trace or read the first process of a process namespace; if it ends its handler, this
process says so. When a program ends, everything that it started is killed. Limits are of the
program and all that it starts: processor time (`timeout_s`), time (twice that, or ten times while
it waits for a processor), memory, processes, files.
"""
