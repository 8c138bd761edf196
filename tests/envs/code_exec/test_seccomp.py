"""The filter, run by an interpreter of the kernel's instructions that is written here."""

import errno
import struct

import pytest

from ludic.envs.code_exec.seccomp import FORBIDDEN, MACHINES, seccomp_filter
from ludic.errors import ConfigError

ALLOWED, KILLED = "allowed", "killed"


def decide(program, audit_number, number, *arguments):
    """What the kernel does with a system call: `allowed`, `killed`, or the error's number."""
    data = struct.pack("<iIQ6Q", number, audit_number, 0, *arguments, *[0] * (6 - len(arguments)))
    register, place = 0, 0
    while True:
        code, if_true, if_false, constant = struct.unpack_from("<HBBI", program, 8 * place)
        place += 1
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, constant)
        elif code == 0x06:
            return {0x7FFF: ALLOWED, 0x8000: KILLED}.get(constant >> 16, constant & 0xFFFF)
        else:
            holds = {0x15: register == constant, 0x35: register >= constant, 0x45: bool(register & constant)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_allowed_and_what_is_not(machine):
    program, (column, audit_number) = seccomp_filter(machine), MACHINES[machine]

    def call(numbers, *arguments):
        return decide(program, audit_number, numbers[column], *arguments)

    for numbers in FORBIDDEN.values():
        assert call(numbers) == errno.EPERM
    forbidden = {numbers[column] for numbers in FORBIDDEN.values()}
    special = {(435, 435)[column]}
    for number in range(470):
        if number not in forbidden | special:
            assert decide(program, audit_number, number) == ALLOWED
    clone, clone3, prlimit, ioctl = (56, 220), (435, 435), (302, 261), (16, 29)
    assert call(clone, 17) == ALLOWED  # fork
    assert call(clone, 0x3D0F00) == ALLOWED  # a thread of the C library
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(clone, flag | 17) == errno.EPERM
    assert call(clone3) == errno.ENOSYS
    assert (call(prlimit, 0), call(prlimit, 1)) == (ALLOWED, errno.EPERM)
    assert call(ioctl, 0, 0x5401) == ALLOWED
    mmap, prctl, private, shared, anonymous = (9, 222), (157, 167), 2, 1, 0x20
    assert call(mmap, 0, 4096, 3, private | anonymous) == ALLOWED
    assert call(mmap, 0, 4096, 3, shared) == ALLOWED  # of a file
    assert call(mmap, 0, 4096, 3, shared | anonymous) == errno.EPERM
    assert (call(prctl, 15), call(prctl, 41)) == (ALLOWED, errno.EPERM)
    for request in (0x5412, 0x40086602, 0x40046602, 0x401C5820):
        assert call(ioctl, 0, request) == errno.EPERM


def test_another_interface_is_refused():
    program = seccomp_filter("x86_64")
    assert decide(program, 0x40000003, 1) == KILLED  # 32 bits: the numbers mean other calls
    assert decide(program, 0xC000003E, 0x40000000 + 101) == errno.ENOSYS  # x32


def test_a_machine_without_numbers_is_refused():
    with pytest.raises(ConfigError, match=r"machine \('vax'\) .*x86_64, aarch64"):
        seccomp_filter("vax")
