"""The first process of a sandbox, which runs programs. It needs Python's standard library alone,
and imports only itself: a sandbox has no other file of this library.

`python -m ludic.envs.code_exec.in_sandbox FOLDER...` reads requests from its stdin and answers on
its stdout, each a line of JSON. FOLDERs are where programs can write.

- `{"op": "compile", "code", "timeout_s"}` -> `{"status", "message", "line", "column", ...}`
- `{"op": "run", "code", "stdin", "timeout_s", "memory_mb", "env"}` -> `{"status", "stdout", ...}`
- `{"op": "clean"}` -> `{"clean": true}`: kills what is left, and deletes all files

Every answer says whether the program's files could be deleted (`clean`).

Each run is a fork of this process, so that the interpreter starts once. A fork has none of this
process's pipes, and cannot signal, trace or read the first process of a process namespace. When a
program ends, everything that it started is killed. Limits are of the program and all that it
starts: processor time (`timeout_s`), time (twice that), resident memory, processes, files.
"""
