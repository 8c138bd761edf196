"""The system calls that programs in a sandbox may not make, as a filter for the kernel.

A filter is a program of the classic BPF machine that sees the number and the arguments of a system
call (`seccomp(2)`). Each instruction is 8 bytes: operation, two jump offsets, a constant. Ours
refuses what reaches other processes, what outlives a program, and large parts of the kernel that
programs do not need; the call then fails with EPERM.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

from ludic.errors import check_value

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in what the filter sees; arguments are 8 bytes each from 16 on, little endian."""
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
FORBIDDEN_REQUESTS = (0x5412, 0x40086602, 0x40046602, 0x401C5820)
"""Of ioctl: TIOCSTI, which types into a terminal, and FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS and
FS_IOC_FSSETXATTR, which mark folders."""

FORBIDDEN = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # what outlives a program, or holds memory that no process is charged for
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    # files of this machine: who may only read a file can lock it
    "flock": (73, 32),
    # what stays with a folder when its files are deleted: attributes, and lists of who may do what
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "file_setattr": (469, 469),
    # network
    "socket": (41, 198),
    "socketpair": (53, 199),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "personality": (135, 92),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
}
"""Name -> its number on x86_64 and on aarch64."""
OF_NETWORK = ("socket", "socketpair")
CLONE, CLONE3 = (56, 220), (435, 435)
OF_ANOTHER_PROCESS = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
"""Allowed with process 0, which is the caller."""
IOCTL = (16, 29)
PRCTL, PR_SET_THP_DISABLE = (157, 167), 41
"""Huge pages hold memory of which only a small part is still mapped."""
MMAP, MAP_SHARED, MAP_ANONYMOUS = (9, 222), 1, 0x20
"""Together they make memory that stays whole while one page of it is mapped. Files in /dev/shm are
shared instead."""


MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Kind of processor -> its column in the tables above, and its number in the filter."""


def seccomp_filter(machine: str | None = None, *, network: bool = False) -> bytes:
    """The filter for a kind of processor, by default this one; with `network`, sockets are allowed.
    ConfigError for a kind whose numbers are not known."""
    name = machine or platform.machine()
    check_value("machine", name, "sandboxes need a system call filter", choices=MACHINES)
    column, audit_number = MACHINES[name]
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, audit_number),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if name == "x86_64":  # the numbers of the x32 interface name the same calls
        program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    program += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]  # then C libraries use clone
    for call, numbers in FORBIDDEN.items():
        if network and call in OF_NETWORK:
            continue
        program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, FAIL | errno.EPERM)]
    program += _unless(CLONE[column], 0, ANY_BIT, [NEW_NAMESPACES])
    program += _unless(IOCTL[column], 1, EQUAL, FORBIDDEN_REQUESTS)
    program += _unless(PRCTL[column], 0, EQUAL, [PR_SET_THP_DISABLE])
    program += [
        (EQUAL, 0, 5, MMAP[column]),
        (LOAD, 0, 0, 16 + 8 * 3),
        (ANY_BIT, 0, 2, MAP_SHARED),
        (ANY_BIT, 0, 1, MAP_ANONYMOUS),
    ]
    program += [(RETURN, 0, 0, FAIL | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    for numbers in OF_ANOTHER_PROCESS.values():
        program += _unless(numbers[column], 0, AT_LEAST, [1])
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _unless(number: int, argument: int, operation: int, constants: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Allow the call unless its argument's lower half fulfils the comparison with one of the
    constants."""
    program = [(EQUAL, 0, 2 * len(constants) + 2, number), (LOAD, 0, 0, 16 + 8 * argument)]
    for constant in constants:
        program += [(operation, 0, 1, constant), (RETURN, 0, 0, FAIL | errno.EPERM)]
    return [*program, (RETURN, 0, 0, ALLOW)]
