"""Programs that try to get out of a sandbox, to stay in it, or to pass a test that they fail.

Each prints `harmless` where it was stopped, or is stopped by a limit: its status is then expected.
Where a program got through, it prints what it got.
"""

from dataclasses import dataclass

from ludic.envs.code_exec.types import RunStatus

HEAD = """
import ctypes, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *arguments):
    if libc.syscall(call, *arguments) >= 0:
        print("allowed", call, arguments)
def fails(action, *errors):
    try:
        result = action()
    except errors or OSError:
        return
    print("allowed", repr(result)[:200])
"""


@dataclass(frozen=True)
class Hostile:
    name: str
    code: str
    status: RunStatus = RunStatus.SUCCESS
    or_status: RunStatus | None = None
    """Another limit that it may reach first."""

    @property
    def stopped_by(self):
        return next(reason for reason, names in STOPPED_BY.items() if self.name in names)

    @property
    def program(self):
        return f"{HEAD}{self.code}\nprint('harmless')"


STOPPED_BY = {
    "no sockets: the filter": ["tcp", "udp", "loopback", "abstract socket", "dns", "netlink", "memory of sockets"],
    "it is not there": ["passwords", "home", "a file of the host"],
    "the first process cannot be looked into": ["root of process 1", "environment", "memory of process 1", "the runner's pipes"],
    "nor can its watcher": ["its watcher's files"],
    "a namespace of processes": ["processes of others", "killing the parent"],
    "it is read-only": ["write outside the workspace", "change the interpreter", "kernel settings"],
    "no capability": ["device files", "become root", "timers of others"],
    "the filter": [
        "ptrace", "mount", "unmount", "nested namespaces", "other namespaces", "bpf and perf", "keys and shared memory",
        "modules and reboot", "other interface", "raised limits", "marks on folders", "locks on files of the host",
        "shared memory that is unmapped", "pages and events that the kernel holds", "huge pages",
    ],
    "the limit of address space": ["memory"],
    "its memory is watched": ["memory of many", "a name that lies", "memory of processes without a first thread"],
    "no such device, or a cgroup": ["shared memory of a device"],
    "folders of limited size": ["memory without a process"],
    "its processes are watched": ["fork bomb"],
    "its processor time is watched": ["threads", "spinning", "ignored signals", "children that nobody counts"],
    "its time is watched": ["sleeping", "stopping itself"],
    "its files are watched": ["many files"],
    "its output is watched": ["huge stdout", "huge stderr"],
    "the first process watches the watcher": ["killing its watcher", "stopping its watcher", "a signal by a pipe"],
    "stdin that nobody reads is dropped": ["closed pipes"],
    "pipes of a user are limited": ["memory of pipes"],
}  # fmt: skip
"""What stops each of the programs below."""

PROGRAMS = [
    Hostile("tcp", "fails(lambda: socket.create_connection(('1.1.1.1', 80), timeout=3))"),
    Hostile("udp", """
fails(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53)))"""),
    Hostile("loopback", "fails(lambda: socket.create_connection(('127.0.0.1', HOST_PORT), timeout=3))"),
    Hostile("abstract socket", "fails(lambda: socket.socket(socket.AF_UNIX).connect('\\0HOST_SOCKET'))"),
    Hostile("dns", "fails(lambda: socket.getaddrinfo('example.com', 80))"),
    Hostile("netlink", "fails(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))"),
    Hostile("passwords", """
fails(lambda: open('/etc/shadow').read())
try: print(open('/etc/passwd').read().count('HOST_PASSWORDS'.strip()) * 'passwords of the host', end='')
except OSError: pass"""),
    Hostile("home", """
for place in ('/root', '/home'):
    try: print(*os.listdir(place), end='')
    except OSError: pass"""),
    Hostile("a file of the host", "fails(lambda: open('HOST_FILE').read())"),
    Hostile("root of process 1", "fails(lambda: os.listdir('/proc/1/root')); fails(lambda: os.listdir('/proc/1/cwd'))"),
    Hostile("environment", """
print(*[name for name in os.environ if 'SECRET' in name], end='')
fails(lambda: open('/proc/1/environ').read())"""),
    Hostile("processes of others", """
others = [n for n in os.listdir('/proc') if n.isdigit() and int(n) not in (1, os.getpid(), os.getppid())]
if others: print(others)"""),
    Hostile("write outside the workspace", """
for place in ('/', '/usr', '/dev', '/run', '/proc', '/usr/lib'): fails(lambda: open(f'{place}/evil', 'w'))"""),
    Hostile("change the interpreter", "fails(lambda: open(os.__file__, 'a'))"),
    Hostile("device files", """
for kind in (0o60600, 0o20600): fails(lambda: os.mknod('device', kind, os.makedev(8, 0)))
for name in ('sda', 'vda', 'mem', 'kmsg', 'kvm', 'fuse', 'nvidia0'): fails(lambda: open(f'/dev/{name}', 'rb').read(1))"""),
    Hostile("kernel settings", """
for name in ('sys/kernel/core_pattern', 'sysrq-trigger', 'sys/vm/drop_caches', '1/oom_score_adj'):
    fails(lambda: open(f'/proc/{name}', 'w').write('1'))"""),
    Hostile("ptrace", "refused(101, 16, 1, 0, 0)"),
    Hostile("memory of process 1", "fails(lambda: open('/proc/1/mem', 'rb')); refused(310, 1, 0, 0, 0, 0, 0)"),
    Hostile("mount", """
refused(165, b'none', b'/tmp', b'tmpfs', 0, 0); refused(428, -100, b'/', 1); refused(430, b'tmpfs', 0)"""),
    Hostile("unmount", "refused(166, b'/workspace', 2); refused(155, b'/tmp', b'/tmp'); refused(161, b'/tmp')"),
    Hostile("nested namespaces", """
for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000): refused(272, flag); refused(56, flag | 17, 0, 0, 0, 0)
refused(435, b'\\0' * 88, 88)"""),
    Hostile("other namespaces", "refused(308, 3, 0); refused(434, -1, 0); refused(438, 3, 0, 0)"),
    Hostile("bpf and perf", """
refused(321, 0, 0, 0); refused(298, b'\\0' * 128, 0, -1, -1, 0); refused(323, 0); refused(425, 8, b'\\0' * 120)"""),
    Hostile("keys and shared memory", """
refused(250, 0, -3, 1)
refused(248, b'user', b'k', b'v', 1, -3)
refused(29, 7, 4096, 0o1666)
refused(240, b'q', 0o102, 0o666, 0)"""),
    Hostile("modules and reboot", """
refused(175, 0, 0, b'')
refused(313, 0, b'', 0)
refused(169, 0xfee1dead, 672274793, 0x1234567, 0)
refused(246, 0, 0, 0, 0)"""),
    Hostile("become root", """
for change in (os.setuid, os.setgid): fails(lambda: change(0))
fails(lambda: os.setgroups([0])); fails(lambda: os.chown('.', 0, 0))
print(*[line for line in open('/proc/self/status') if line.startswith('CapEff') and int(line.split()[1], 16)], end='')"""),
    Hostile("other interface", "refused(0x40000000 + 39)"),
    Hostile("memory", "x = [bytearray(10**7) for _ in range(100)]", RunStatus.MEMORY_EXCEEDED),
    Hostile("memory of many", """
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 << 20); time.sleep(100)
time.sleep(100)""", RunStatus.MEMORY_EXCEEDED),
    Hostile("memory of processes without a first thread", """
def hold():
    time.sleep(0.2)
    x = bytearray(60 << 20)
    time.sleep(5)
for _ in range(8):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        libc.syscall(60, 0)
time.sleep(5)""", RunStatus.MEMORY_EXCEEDED),
    Hostile("shared memory that is unmapped", """
def hold():
    parts = [mmap.mmap(-1, 60 << 20) for _ in range(3)]
    for part in parts:
        for start in range(0, len(part), 4 << 20):
            part[start:start + (4 << 20)] = bytes(4 << 20)
            part.madvise(mmap.MADV_DONTNEED)
    time.sleep(1)
    return parts
fails(hold)"""),
    Hostile("shared memory of a device", """
def hold():
    parts, zeros = [], os.open('/dev/zero', os.O_RDWR)
    for _ in range(16):
        parts.append(mmap.mmap(zeros, 60 << 20))
        for start in range(0, 60 << 20, 4 << 20):
            parts[-1][start:start + (4 << 20)] = bytes(4 << 20)
            parts[-1].madvise(mmap.MADV_DONTNEED)
        rest = ctypes.addressof(ctypes.c_char.from_buffer(parts[-1], 4096))
        libc.munmap(ctypes.c_void_p(rest), ctypes.c_size_t((60 << 20) - 4096))
    time.sleep(1)
    return parts
fails(hold)
print(set(open('/dev/zero', 'rb').read(100)) - {0} or '', end='')""", RunStatus.SUCCESS, RunStatus.MEMORY_EXCEEDED),
    Hostile("huge pages", """
refused(157, 41, 0, 0, 0, 0)
part = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
part.madvise(mmap.MADV_HUGEPAGE)
part[:] = b'x' * len(part)
sizes = [int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')]
if sum(sizes): print(sum(sizes))"""),
    Hostile("pages and events that the kernel holds", "refused(278, 1, 0, 0, 0); refused(253); refused(294, 0)"),
    Hostile("locks on files of the host", "import fcntl; fails(lambda: fcntl.flock(open(os.__file__), fcntl.LOCK_EX))"),
    Hostile("memory without a process", """
refused(319, b'x', 0)
for place in ('/dev/shm', '/tmp', '/workspace'):
    def fill():
        with open(place + '/f', 'wb') as file:
            for _ in range(500): file.write(b'x' * 10**6)
    fails(fill)"""),
    Hostile("raised limits", """
for what in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
    fails(lambda: resource.setrlimit(what, (-1, -1)), ValueError, OSError)
fails(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))"""),
    Hostile("fork bomb", """
while True:
    try: os.fork()
    except OSError: pass""", RunStatus.RUNTIME_ERROR, RunStatus.MEMORY_EXCEEDED),
    Hostile("threads", """
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin).start()""", RunStatus.TIMEOUT),
    Hostile("spinning", "while True: pass", RunStatus.TIMEOUT),
    Hostile("sleeping", "time.sleep(1000)", RunStatus.TIMEOUT),
    Hostile("many files", "for i in range(10**6): open(f'f{i}', 'w').close()", RunStatus.RUNTIME_ERROR),
    Hostile("huge stdout", "while True: os.write(1, b'x' * 10**6)", RunStatus.RUNTIME_ERROR),
    Hostile("huge stderr", "while True: os.write(2, b'x' * 10**6)", RunStatus.RUNTIME_ERROR),
    Hostile("ignored signals", """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""", RunStatus.TIMEOUT),
    Hostile("killing the parent", """
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGUSR1):
    os.kill(1, number)
fails(lambda: os.kill(os.getppid() + 10**6, 9))"""),
    Hostile("the runner's pipes", """
for end in range(3, 300): fails(lambda: os.write(end, b'{"status": "success"}\\n'))
fails(lambda: os.listdir('/proc/1/fd'))"""),
    Hostile("memory of sockets", "fails(lambda: socket.socketpair())"),
    Hostile("children that nobody counts", """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        os._exit(0)
    fails(os.wait, ChildProcessError)""", RunStatus.TIMEOUT),
    Hostile("killing its watcher", "os.kill(os.getppid(), signal.SIGKILL); time.sleep(100)", RunStatus.KILLED),
    Hostile("stopping its watcher", "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(100)", RunStatus.KILLED),
    Hostile("closed pipes", "for end in (0, 2): os.close(end)"),
    Hostile("its watcher's files", """
for name in ('mem', 'maps', 'environ', 'auxv', 'stack', 'syscall', 'io'):
    fails(lambda: open(f'/proc/{os.getppid()}/{name}', 'rb').read(1))
for name in ('fd', 'fdinfo', 'root', 'cwd', 'map_files'): fails(lambda: os.listdir(f'/proc/{os.getppid()}/{name}'))
refused(310, os.getppid(), 0, 0, 0, 0, 0)"""),
    Hostile("timers of others", """
for number in (1, os.getppid()):
    def slow():
        end = os.open(f'/proc/{number}/timerslack_ns', os.O_WRONLY)
        os.write(end, b'1000000000000')
    fails(slow)"""),
    Hostile("marks on folders", """
import array, fcntl
for place in ('/workspace', '/tmp', '/dev/shm'):
    nobody = b'\\2\\0\\0\\0' + b''.join(tag + b'\\0\\0\\0' + b'\\xff' * 4 for tag in (b'\\1', b'\\4', b'\\x20'))
    for name, value in (('user.x', b'x'), ('system.posix_acl_default', nobody)):
        fails(lambda: os.setxattr(place, name, value))
    folder = os.open(place, os.O_RDONLY)
    for request in (0x40086602, 0x401c5820): fails(lambda: fcntl.ioctl(folder, request, array.array('i', [0x80] + [0] * 6)))"""),
    Hostile("a name that lies", """
libc.prctl(15, b') R 0 0 0 (', 0, 0, 0)
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 << 20); time.sleep(100)
time.sleep(100)""", RunStatus.MEMORY_EXCEEDED),
    Hostile("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", RunStatus.TIMEOUT),
    Hostile("a signal by a pipe", """
import fcntl
fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(1, 10, signal.SIGKILL)
fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_ASYNC)
os.write(1, b'x')
time.sleep(100)""", RunStatus.KILLED),
    Hostile("memory of pipes", """
import fcntl
ends = []
def fill():
    while True:
        ends.append(os.pipe())
        for end in ends[-1]: os.set_blocking(end, False)
        try: fcntl.fcntl(ends[-1][1], 1031, 1 << 20)
        except OSError: pass
        try:
            while True: os.write(ends[-1][1], b'x' * 65536)
        except BlockingIOError: pass
fails(fill)
held = sum(fcntl.fcntl(end, 1032) for _, end in ends)
if held > 64 << 20: print(held)"""),
]  # fmt: skip

LEAVES = [
    Hostile("a child that stays", """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
os.wait()"""),
    Hostile("files", "for place in ('/workspace', '/tmp', '/dev/shm'): open(place + '/left', 'w').write('x')"),
    Hostile("a folder nobody may read", "os.makedirs('a/b'); open('a/b/left', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)"),
    Hostile("links", """
os.symlink('/', 'root')
os.symlink('/workspace', 'self')
os.link('/workspace/root', 'other', follow_symlinks=False)
os.mkfifo('pipe')"""),
    Hostile("a deep folder", "for _ in range(1500): os.mkdir('d'); os.chdir('d')"),
    Hostile("folders that nobody may enter", "for place in ('/workspace', '/tmp', '/dev/shm'): os.chmod(place, 0)"),
    Hostile("a child of its watcher", """
if libc.syscall(56, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(1000)"""),
    Hostile("numbers in the times of folders", """
for place in ('/workspace', '/tmp', '/dev/shm'): os.utime(place, ns=(10**18 + 7, 10**18 + 7))"""),
    Hostile("a stopped child", "if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)"),
]  # fmt: skip
"""What they leave must be gone when the next program starts; `LEFT` prints it."""

LEFT = """
import os
for place in ("/workspace", "/tmp", "/dev/shm"):
    print(*os.listdir(place), *[name for name in os.listxattr(place) if not name.startswith("security.")], end="")
    print(*[time for time in (os.stat(place).st_atime_ns, os.stat(place).st_mtime_ns) if time == 10**18 + 7], end="")
print(*[name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid())], end="")
"""

CHEATS = [
    Hostile("reads what programs before it printed", """
import re
found = b""
for line in open("/proc/self/maps"):
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    if "rw" in line.split()[1]:
        try:
            with open("/proc/self/mem", "rb") as memory:
                memory.seek(start)
                found += memory.read(end - start)
        except (OSError, ValueError):
            pass
for match in re.findall(rb"printed-before-[0-9a-f]+", found):
    print(match.decode())"""),
    Hostile("prints the channel's answer", """
print('{"status": "success", "stdout": "42", "clean": true}')"""),
    Hostile("right answer, then more", "print(42); print('more')"),
    Hostile("right answer, then an error", "print(42); raise SystemExit(1)"),
    Hostile("right answer, then a crash", "print(42, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"),
    Hostile("leaves at once", "os._exit(0)"),
    Hostile("replaces stdout", """
class Fake:
    def write(self, text): return len(text)
    def flush(self): pass
sys.stdout = Fake()
print(42)"""),
    Hostile("replaces the exit", """
import atexit
os._exit = lambda code: None
sys.exit = lambda code=0: None
atexit._run_exitfuncs = lambda: os.write(1, b'41')"""),
    Hostile("replaces builtins", """
import builtins
builtins.str = builtins.print = builtins.compile = None
builtins.exec = lambda *a: None"""),
    Hostile("asks the frames", """
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_globals.items()) + list(frame.f_locals.items()):
        if 'expected' in str(name): print(value)
    frame = frame.f_back"""),
    Hostile("asks the collector", """
import gc
print(*{one for one in gc.get_objects() if isinstance(one, str) and one == '4' + '2'})"""),
    Hostile("other digits", "print('\u0664\u0662'); "),
    Hostile("changes the runner's modules", """
for name, module in list(sys.modules.items()):
    if 'in_sandbox' in name:
        for key in [*vars(module)]: setattr(module, key, lambda *a, **k: {'status': 'success', 'stdout': '42'})"""),
    Hostile("changes the runner's functions", """
import builtins
main = [f for f in sys._current_frames().values()][0]
while main.f_back: main = main.f_back
main.f_globals['status_of'] = lambda *a: 'success'
main.f_globals['run_child'] = lambda *a: {'status': 'success', 'stdout': '42'}"""),
]  # fmt: skip
"""Programs for a test whose expected output is `42`. None may pass it."""
