"""Twenty small tasks in Harbor's format, each with the commands that solve it and three scripts
that do not. Ten are solved by one command, ten by several, whose later ones use what earlier ones
show or leave."""

from pathlib import Path
from typing import NamedTuple

from ludic.envs.terminal import run_script, solve, verify, write_task

LOG = "1 ok\n2 failed\n3 ok\n4 failed\n5 failed\n"
SCRIPT = "#!/bin/sh\necho hello\n"
NUMBERS = "3\n10\n2\n"


class ShellTask(NamedTuple):
    name: str
    instruction: str
    files: dict[str, str]
    test: str
    commands: tuple[str, ...]
    wrong: tuple[str, str, str]

    def write(self, folder: Path) -> Path:
        solution = "\n".join(self.commands) + "\n"
        return write_task(folder / self.name, instruction=self.instruction, test=self.test, files=self.files, solution=solution)


async def judge(make, task, script=None):
    """The verdict in a sandbox that `make` returns, after a script or the task's solution."""
    sandbox = make()
    try:
        await sandbox.start()
        if script is None:
            return (await solve(task, sandbox))["reward"]
        await run_script(sandbox, script, {}, timeout_s=60)
        return (await verify(task, sandbox))["reward"]
    finally:
        await sandbox.stop()


def holds(name, text):
    """A test: the file has exactly these lines."""
    return f'[ "$(cat /app/{name})" = "{text}" ]'


def one(name, instruction, files, test, command, *wrong):
    return ShellTask(name, instruction, files, test, (command,), wrong)


ONE_COMMAND = [
    one(
        "copy",
        "Copy in to out.",
        {"in": "a\nb\n"},
        holds("out", "a\nb"),
        "cp in out",
        "touch out",
        "head -1 in >out",
        "mv out in",
    ),
    one(
        "count",
        "Write the number of lines of log into n.",
        {"log": LOG},
        holds("n", "5"),
        "wc -l <log >n",
        "echo 4 >n",
        "wc -c <log >n",
        "wc -l log >n",
    ),
    one(
        "sum",
        "Write the sum of numbers into sum.",
        {"numbers": NUMBERS},
        holds("sum", "15"),
        "awk '{s+=$1} END {print s}' numbers >sum",
        "echo 13 >sum",
        "cat numbers >sum",
        "wc -l <numbers >sum",
    ),
    one(
        "sort",
        "Sort numbers as numbers into sorted.",
        {"numbers": NUMBERS},
        holds("sorted", "2\n3\n10"),
        "sort -n numbers >sorted",
        "sort numbers >sorted",
        "sort -rn numbers >sorted",
        "cp numbers sorted",
    ),
    one(
        "failed",
        "Write the numbers of the lines of log that failed into bad.",
        {"log": LOG},
        holds("bad", "2\n4\n5"),
        "awk '/failed/ {print $1}' log >bad",
        "grep failed log >bad",
        "awk '{print $1}' log >bad",
        "echo 2 >bad",
    ),
    one(
        "replace",
        "Replace red by blue everywhere in colours.",
        {"colours": "red, red\ngreen\nred\n"},
        holds("colours", "blue, blue\ngreen\nblue"),
        "sed -i s/red/blue/g colours",
        "sed -i s/red/blue/ colours",
        "sed -i s/red/Blue/g colours",
        "true",
    ),
    one(
        "rights",
        "Make run.sh executable.",
        {"run.sh": SCRIPT},
        "[ -x /app/run.sh ] && [ $(/app/run.sh) = hello ]",
        "chmod +x run.sh",
        "chmod -x run.sh",
        "rm run.sh",
        ": >run.sh; chmod +x run.sh",
    ),
    one(
        "link",
        "Make latest a symbolic link to v2.",
        {"v1": "1", "v2": "2"},
        "[ $(readlink /app/latest) = v2 ]",
        "ln -s v2 latest",
        "cp v2 latest",
        "ln -s v1 latest",
        "ln v2 latest",
    ),
    one(
        "delete",
        "Delete all files that end in .tmp, in all folders, and no other.",
        {"a.tmp": "", "b/c.tmp": "", "b/keep": ""},
        '[ -z "$(find /app -name "*.tmp")" ] && [ -f /app/b/keep ]',
        "find . -name '*.tmp' -delete",
        "rm *.tmp",
        "rm -r b",
        "rm -rf ./*",
    ),
    one(
        "columns",
        "Write the second column of table into names.",
        {"table": "1,ann,x\n2,bob,y\n"},
        holds("names", "ann\nbob"),
        "cut -d, -f2 table >names",
        "cut -d, -f1 table >names",
        "cut -d, -f2- table >names",
        "cut -f2 table >names",
    ),
]
SEVERAL_COMMANDS = [
    ShellTask(
        "chain",
        "start names a file, which names a file. Write the content of that into out.",
        {"start": "k7", "k7": "k2", "k2": "pear", "k3": "fig"},
        holds("out", "pear"),
        ("cat start", "cat k7", "cp k2 out"),
        ("cp k7 out", "cp k3 out", "echo start >out"),
    ),
    ShellTask(
        "archive",
        "Pack the folder data into data.tar.gz, then delete the folder.",
        {"data/a": "1", "data/b": "2"},
        '[ ! -e /app/data ] && [ "$(tar -xOzf /app/data.tar.gz data/b)" = 2 ]',
        ("tar -czf data.tar.gz data", "tar -tzf data.tar.gz", "rm -r data"),
        ("tar -czf data.tar.gz data", "rm -r data", "touch data.tar.gz; rm -r data"),
    ),
    ShellTask(
        "backup",
        "Copy every file of src into old, then write v2 into src/version.",
        {"src/version": "v1", "src/x": "y"},
        "[ $(cat /app/old/version) = v1 ] && [ $(cat /app/old/x) = y ] && [ $(cat /app/src/version) = v2 ]",
        ("mkdir old", "cp src/* old", "echo v2 >src/version"),
        ("echo v2 >src/version", "echo v2 >src/version; cp -r src old", "cp -r src old"),
    ),
    ShellTask(
        "rename",
        "Rename all .txt files to .md.",
        {"a.txt": "1", "b.txt": "2", "c.log": "3"},
        '[ "$(cd /app; ls | tr "\\n" " ")" = "a.md b.md c.log " ]',
        ("ls", "mv a.txt a.md", "mv b.txt b.md"),
        ("mv a.txt a.md", "rm *.txt", "for f in *; do mv $f $f.md; done"),
    ),
    ShellTask(
        "largest",
        "Write the name of the largest file of parts into largest, and its size in bytes after a space.",
        {"parts/a": "1" * 30, "parts/b": "1" * 200, "parts/c": "1" * 90},
        holds("largest", "b 200"),
        ("ls -S parts | head -1", "wc -c <parts/b", "echo b 200 >largest"),
        ("ls parts | head -1 >largest", "echo c 90 >largest", "echo b >largest"),
    ),
    ShellTask(
        "secret",
        "One file of box has the word TREASURE. Move it to found, and empty the others.",
        {"box/1": "sand", "box/2": "a TREASURE", "box/3": "sand"},
        'grep -q TREASURE /app/found && [ ! -e /app/box/2 ] && [ -f /app/box/3 ] && [ -z "$(cat /app/box/*)" ]',
        ("grep -l TREASURE box/*", "mv box/2 found", "for f in box/*; do : >$f; done"),
        ("cp box/2 found", "mv box/1 found", "mv box/2 found; rm -r box"),
    ),
    ShellTask(
        "repair",
        "run.sh should print 5 and exit with 0. Repair it.",
        {"run.sh": "#!/bin/sh\necho $((2 + 2)\n"},
        '[ "$(sh /app/run.sh)" = 5 ] && sh /app/run.sh && grep -q "2 +" /app/run.sh',
        ("sh run.sh", "cat run.sh", "sed -i 's/2 + 2)/2 + 3))/' run.sh"),
        ("sed -i 's/2 + 2)/2 + 2))/' run.sh", "echo 'echo 5' >run.sh", "rm run.sh"),
    ),
    ShellTask(
        "merge",
        "Merge the lines of a and b into both, sorted, each once; then write their number into n.",
        {"a": "x\nz\n", "b": "y\nx\n"},
        holds("both", "x\ny\nz") + " && " + holds("n", "3"),
        ("sort -u a b >both", "wc -l <both >n"),
        ("sort a b >both; wc -l <both >n", "cat a b | uniq >both; echo 3 >n", "sort -u a b >both"),
    ),
    ShellTask(
        "state",
        "Run ./step three times; each needs the file that the one before left.",
        {"step": "n=$(cat /app/at 2>/dev/null || echo 0)\necho $((n + 1)) >/app/at\n"},
        holds("at", "3"),
        ("sh ./step", "sh ./step", "sh ./step"),
        ("sh ./step", "sh ./step; sh ./step", "for i in 1 2 3 4; do sh ./step; done"),
    ),
    ShellTask(
        "cleanup",
        "Write into pid.txt the number of the files in tmp, delete them, and leave the folder.",
        {"tmp/a": "", "tmp/b": "", "tmp/c": ""},
        '[ $(cat /app/pid.txt) = 3 ] && [ -d /app/tmp ] && [ -z "$(ls -A /app/tmp)" ]',
        ("ls tmp | wc -l >pid.txt", "cat pid.txt", "rm tmp/*"),
        ("rm tmp/*; ls tmp | wc -l >pid.txt", "ls tmp | wc -l >pid.txt; rm -r tmp", "echo 3 >pid.txt"),
    ),
]
TASKS = [*ONE_COMMAND, *SEVERAL_COMMANDS]
