"""What a process with code from outside may not ask of the kernel: a seccomp filter and a Landlock domain,
which nothing undoes.

It may compute, read and write files, start threads and run compilers. It may not touch other processes, leave
the tree that its parent holds (holding.py), change clocks or limits, or have the kernel work while it stands
still. A call that is refused fails with EPERM. New privileges are off too: set-uid programs get none. A
filter does not see names of files, so Landlock refuses the memory of others in /proc, to root too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping
from typing import TypeAlias

# number on x86_64 and on aarch64; why it is refused
REFUSED = {
    "ptrace": (101, 117),  # others' memory and steps
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "userfaultfd": (323, 282),  # memory that makes its reader wait
    "io_uring_setup": (425, 425),  # work by the kernel's own threads
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "tkill": (200, 130),  # signals
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setrlimit": (160, 164),  # limits, priorities, scheduling
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "clock_settime": (227, 112),  # the parent's clocks
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "mount": (165, 40),  # other files, other namespaces
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "socket": (41, 198),  # others on the network
    "bpf": (321, 280),  # code in the kernel
    "perf_event_open": (298, 241),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
}
CLONE_UNTRACED = 0x00800000
NEW_NAMESPACES = 0x7E020000
SET_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a file that signals others
# FIOSETOWN, SIOCSPGRP; TIOCSTI types for the user; USERFAULTFD_IOC_NEW of /dev/userfaultfd
IOCTLS = (0x8901, 0x8902, 0x5412, 0xAA00)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32 = 0x40000000  # a second table of calls on x86_64
SECCOMP = (317, 277)
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # of Landlock
MAKE_BLOCK, REFER = 1 << 11, 1 << 13  # make a block device; move files between folders

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE = 0, 4  # where they lie in what a filter sees
Step: TypeAlias = tuple[int, int, int, int]  # code, steps to skip if true and if false, operand


def _argument(place: int, high: bool = False) -> int:
    return 16 + 8 * place + 4 * high


def steps(own_pid: int, machine: str = platform.machine()) -> list[Step]:
    """The filter as a program. Each part ends the program, or goes on with the number of the call loaded."""
    column, architecture = ARCHITECTURES[machine]
    no: Step = (RETURN, 0, 0, ERROR | errno.EPERM)
    yes: Step = (RETURN, 0, 0, ALLOW)
    program: list[Step] = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), no,
    ]  # fmt: skip

    def on(numbers: tuple[int, int], *inside: Step) -> None:
        program.extend([(EQUAL, 0, len(inside), numbers[column]), *inside])

    for numbers in REFUSED.values():
        on(numbers, no)
    on((435, 435), (RETURN, 0, 0, ERROR | errno.ENOSYS))  # clone3 hides its flags; libraries then use clone
    flags = CLONE_UNTRACED | NEW_NAMESPACES
    on((56, 220), (LOAD, 0, 0, _argument(0)), (ANY_BIT, 0, 1, flags), no, yes)
    for numbers in ((62, 129), (234, 131)):  # kill, tgkill: itself alone
        on(numbers, (LOAD, 0, 0, _argument(0)), (EQUAL, 0, 1, own_pid), yes, no)
    for numbers in ((203, 122), (256, 238), (279, 239)):  # sched_setaffinity, migrate_pages, move_pages
        on(numbers, (LOAD, 0, 0, _argument(0)), (EQUAL, 0, 1, 0), yes, no)
    low, high = (LOAD, 0, 0, _argument(2)), (LOAD, 0, 0, _argument(2, high=True))
    on((302, 261), low, (EQUAL, 0, 2, 0), high, (EQUAL, 1, 0, 0), no, yes)  # prlimit64: asking, not setting
    for numbers, refused in (((72, 25), SET_OWNER), ((16, 29), IOCTLS)):  # fcntl, ioctl
        tests = [(EQUAL, len(refused) - place, 0, value) for place, value in enumerate(refused)]
        on(numbers, (LOAD, 0, 0, _argument(1)), *tests, yes, no)
    return [*program, yes]


def forbid() -> None:
    """From here on, for this process and all it starts. OSError if this system cannot."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter for {sys.platform} on {machine}")
    program = b"".join(struct.pack("=HBBI", *step) for step in steps(os.getpid(), machine))
    code = ctypes.create_string_buffer(program)
    given = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc = _libc()
    no_new_privileges, set_filter, all_threads = 38, 1, 1
    number = SECCOMP[ARCHITECTURES[machine][0]]
    _must(libc.prctl(no_new_privileges, 1, 0, 0, 0))
    if version := landlock_version():
        _enter_domain(version)
    _must(libc.syscall(number, set_filter, all_threads, given))  # last: who is filtered has all of it


def landlock_version() -> int:
    """0 if this system has no Landlock."""
    return max(0, _libc().syscall(CREATE_RULESET, None, 0, 1)) if sys.platform == "linux" else 0


def _enter_domain(version: int) -> None:
    """Enters a Landlock domain of its own: no process outside it can be traced, nor its memory opened. A
    domain must forbid something of files; this one forbids block devices."""
    # it holds the thread that enters, and all that comes of it
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        raise OSError(errno.EBUSY, "another thread runs already")
    libc, moves = _libc(), version > 1  # the first version forbids moves between folders, whatever it is told
    handled = struct.pack("=Q", MAKE_BLOCK | (REFER if moves else 0))
    ruleset = _must(libc.syscall(CREATE_RULESET, handled, len(handled), 0))
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        if moves:
            _must(libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", REFER, root), 0))
        _must(libc.syscall(RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(root)
        os.close(ruleset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _must(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def is_filtered(status: Mapping[str, str]) -> bool:
    """By what /proc/PID/status says of a process."""
    return status.get("Seccomp") == "2" and status.get("NoNewPrivs") == "1"
