"""The system-call filter: system calls that programs have no need for.

A deny list, not an allow list: programs come from thirty languages, and namespaces, Landlock and the missing
capabilities already limit what they can reach. The filter removes kernel attack surface, ways to leave something behind
for the next run, and ways to affect the worker, which shares the program's user id.
"""

from __future__ import annotations

import errno
import struct

from .kernel import CLONE_NEWCGROUP, LANDLOCK_RESTRICT_SELF, MACHINE, NAMESPACES, OPENAT2

# name: (x86_64, aarch64); None where the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # the file system tree and the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458),
    "open_tree_attr": (467, 467), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "sethostname": (170, 161), "setdomainname": (171, 162), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "acct": (163, 89),
    "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "vhangup": (153, 58),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "uselib": (134, None), "ustat": (136, None),
    "sysfs": (139, None), "_sysctl": (156, None), "modify_ldt": (154, None), "personality": (135, 92),
    "file_setattr": (469, 469), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    # namespaces, and the jail's own tools
    "unshare": (272, 97), "setns": (308, 268), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    # large, often attacked parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "vmsplice": (278, 75), "memfd_secret": (447, 447),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "map_shadow_stack": (453, 453),
    "lsm_get_self_attr": (459, 459), "lsm_set_self_attr": (460, 460), "lsm_list_modules": (461, 461),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "ioprio_set": (251, 30),
    # objects that outlive their maker inside the worker's IPC namespace
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
}  # fmt: skip

# Answered with "no such call", so that libraries fall back: io_uring to epoll, clone3 to clone, whose flags we can see,
# asynchronous I/O to threads, inotify to polling. The last two are counted per host user or for the whole machine, and
# inotify would also reveal which files of a shared directory the host uses.
_ABSENT: dict[str, tuple[int, int | None]] = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "clone3": (435, 435),
    "io_setup": (206, 0), "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip
_MEMFD_CREATE = (319, 279)

# If the file tree is the host's. Landlock does not cover these calls; they succeed without effect, since programs that
# copy files make them in passing and would fail needlessly. Times can be set on files that everyone may write, ...
_TIMES: dict[str, tuple[int | None, int | None]] = {
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
# ... modes on files one owns, which without a separate user id are all of the host user's.
_MODES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
}  # fmt: skip
# These may report that the file system does not support them, and programs accept it.
_ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466),
}  # fmt: skip
# Before version 3, Landlock does not cover truncation. By name it can be refused, and so can opening a file to truncate
# it without writing to it, for which Landlock does not require the right to write.
_LANDLOCK_TRUNCATES = 3
_TRUNCATE: tuple[int, int] = (76, 45)
_OPENS_BY_FLAGS: dict[tuple[int, int | None], int] = {(2, None): 1, (257, 56): 2}  # open, openat: index of flags
_O_TRUNC, _ACCESS_MODES, _READ_ONLY, _NO_ACCESS = 0x200, 3, 0, 3
_CLONE, _SOCKET, _SOCKETPAIR, _SETSOCKOPT, _IOCTL = (56, 220), (41, 198), (53, 199), (54, 208), (16, 29)
_PRLIMIT64, _SETRLIMIT, _SCHED_SETAFFINITY, _SETPRIORITY = (302, 261), (160, 164), (203, 122), (141, 140)
_FCNTL, _MMAP = (72, 25), (9, 222)

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCH = 0, 4
_AF_UNIX, _AF_INET, _SOL_SOCKET, _SO_SNDBUF = 1, 2, 1, 7
_SOCK_STREAM, _SOCK_SEQPACKET, _IPPROTO_TCP, _TCP_ULP = 1, 5, 6, 31
_REFUSED_IOCTLS = (0x5412, 0x541C, 0x40086602, 0x401C5820)
"""Typing into a terminal (TIOCSTI, TIOCLINUX); persistent file flags (FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR)."""

_REFUSED_FCNTLS = (1024, 1026, 1031)
"""Leases, which block others that open the file (F_SETLEASE); notifications of what others do in a directory
(F_NOTIFY); larger pipes, whose pages are counted per user (F_SETPIPE_SZ)."""
_RLIMIT_CORE = 4
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN = 0x1, 0x20, 0x100

Instruction = tuple[int, int, int, int]


def _error(number: int) -> int:
    return 0x00050000 | number


def _argument(index: int, *, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))


def _only_zero(index: int) -> list[Instruction]:
    """Allow the call only on the caller itself (pid 0)."""
    refuse = (_RETURN, 0, 0, _error(errno.EPERM))
    return [_argument(index), (_JUMP_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), refuse]


def _none_of(index: int, refused: tuple[int, ...]) -> list[Instruction]:
    """Refuse the call if the argument is one of these."""
    tests = [(_JUMP_EQUAL, len(refused) - at, 0, code) for at, code in enumerate(refused)]
    return [_argument(index), *tests, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _error(errno.EPERM))]


def _special_cases() -> dict[tuple[int, int], list[Instruction]]:
    refuse, allow = (_RETURN, 0, 0, _error(errno.EPERM)), (_RETURN, 0, 0, _ALLOW)
    no_effect = (_RETURN, 0, 0, _error(0))
    # "Network is unreachable" is what a program on an offline machine would see, and what its author understands.
    local = [_argument(0), (_JUMP_EQUAL, 0, 1, _AF_UNIX), allow, (_RETURN, 0, 0, _error(errno.ENETUNREACH))]
    return {
        _CLONE: [_argument(0), (_JUMP_SET, 0, 1, NAMESPACES | CLONE_NEWCGROUP), refuse, allow],
        _SOCKET: local,
        _SOCKETPAIR: local,
        # A larger buffer is only a hint, which we ignore: data in sockets is not counted as any process's memory.
        _SETSOCKOPT: [
            _argument(1), (_JUMP_EQUAL, 0, 3, _SOL_SOCKET), _argument(2), (_JUMP_EQUAL, 0, 1, _SO_SNDBUF),
            no_effect, allow,
        ],
        _IOCTL: _none_of(1, _REFUSED_IOCTLS),
        _FCNTL: _none_of(1, _REFUSED_FCNTLS),
        # The core file limit stays at 1 (see `launch`). Careful programs lower it to 0, which would let a crash start
        # the host's handler: the call succeeds without effect.
        _SETRLIMIT: [_argument(0), (_JUMP_EQUAL, 0, 1, _RLIMIT_CORE), no_effect, allow],
        # Reading another process's limits (a null new limit) is harmless; setting them would affect the worker.
        _PRLIMIT64: [
            _argument(1), (_JUMP_EQUAL, 0, 6, _RLIMIT_CORE), _argument(2), (_JUMP_EQUAL, 0, 3, 0),
            _argument(2, high=True), (_JUMP_EQUAL, 0, 1, 0), allow, no_effect,
            _argument(0), (_JUMP_EQUAL, 0, 1, 0), allow,
            _argument(2), (_JUMP_EQUAL, 0, 3, 0), _argument(2, high=True), (_JUMP_EQUAL, 0, 1, 0), allow, refuse,
        ],
        _SCHED_SETAFFINITY: _only_zero(0),
        _SETPRIORITY: [_argument(0), (_JUMP_EQUAL, 0, 3, 0), _argument(1), (_JUMP_EQUAL, 0, 1, 0), allow, refuse],
    }  # fmt: skip


def _search(cases: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search over the call numbers: about seven comparisons instead of a hundred."""
    if len(cases) == 1:
        number, body = cases[0]
        return [(_JUMP_EQUAL, 0, len(body), number), *body, (_RETURN, 0, 0, _ALLOW)]
    middle = len(cases) // 2
    lower, upper = _search(cases[:middle]), _search(cases[middle:])
    return [(_JUMP_GREATER_EQUAL, 0, 1, cases[middle][0]), (_JUMP, 0, 0, len(lower)), *lower, *upper]


def _without_network_namespace() -> dict[tuple[int, int], list[Instruction]]:
    """No unix sockets either, except pairs that cannot be connected elsewhere: the host's services listen there."""
    refuse, allow = (_RETURN, 0, 0, _error(errno.ENETUNREACH)), (_RETURN, 0, 0, _ALLOW)
    return {
        _SOCKET: [refuse],
        _SOCKETPAIR: [
            _argument(0), (_JUMP_EQUAL, 0, 5, _AF_UNIX), _argument(1), (_AND, 0, 0, 0xF),
            (_JUMP_EQUAL, 1, 0, _SOCK_STREAM), (_JUMP_EQUAL, 0, 1, _SOCK_SEQPACKET), allow, refuse,
        ],
    }  # fmt: skip


def _with_tcp() -> dict[tuple[int, int], list[Instruction]]:
    """TCP over IPv4 as well, but none of the protocols that the kernel can put on top of it, such as TLS."""
    refuse, allow = (_RETURN, 0, 0, _error(errno.ENETUNREACH)), (_RETURN, 0, 0, _ALLOW)
    return {
        _SOCKET: [
            _argument(0), (_JUMP_EQUAL, 7, 0, _AF_UNIX), (_JUMP_EQUAL, 0, 7, _AF_INET),
            _argument(1), (_AND, 0, 0, 0xF), (_JUMP_EQUAL, 0, 4, _SOCK_STREAM),
            _argument(2), (_JUMP_EQUAL, 1, 0, 0), (_JUMP_EQUAL, 0, 1, _IPPROTO_TCP), allow, refuse,
        ],
        _SETSOCKOPT: [
            _argument(1), (_JUMP_EQUAL, 3, 0, _IPPROTO_TCP), (_JUMP_EQUAL, 0, 5, _SOL_SOCKET),
            _argument(2), (_JUMP_EQUAL, 4, 3, _SO_SNDBUF),
            _argument(2), (_JUMP_EQUAL, 0, 1, _TCP_ULP), (_RETURN, 0, 0, _error(errno.ENOPROTOOPT)),
            allow, (_RETURN, 0, 0, _error(0)),
        ],
    }  # fmt: skip


def _counted_memory_only() -> list[Instruction]:
    """Allow only memory that a process's limit counts: no anonymous memory that is shared or marked as a stack.

    Files may be shared: they count as disk.
    """
    return [
        _argument(3), (_JUMP_SET, 0, 2, _MAP_ANONYMOUS), (_JUMP_SET, 2, 0, _MAP_SHARED),
        (_JUMP_SET, 1, 0, _MAP_GROWSDOWN), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _error(errno.EPERM)),
    ]  # fmt: skip


def _without_truncation(column: int) -> dict[int, list[Instruction]]:
    refuse, allow = (_RETURN, 0, 0, _error(errno.EACCES)), (_RETURN, 0, 0, _ALLOW)
    # The flags of openat2 are in memory, which a filter cannot see. The call is new enough to be missing.
    cases: dict[int, list[Instruction]] = {
        _TRUNCATE[column]: [refuse],
        OPENAT2: [(_RETURN, 0, 0, _error(errno.ENOSYS))],
    }
    for numbers, flags in _OPENS_BY_FLAGS.items():
        number = numbers[column]
        if number is not None:
            cases[number] = [
                _argument(flags), (_JUMP_SET, 0, 3, _O_TRUNC), (_AND, 0, 0, _ACCESS_MODES),
                (_JUMP_EQUAL, 2, 0, _READ_ONLY), (_JUMP_EQUAL, 1, 0, _NO_ACCESS), allow, refuse,
            ]  # fmt: skip
    return cases


def _without_private_root(column: int, *, own_user: bool) -> dict[int, list[Instruction]]:
    answers = [(0, _TIMES), (errno.EOPNOTSUPP, _ATTRIBUTES), *([] if own_user else [(0, _MODES)])]
    return {
        number: [(_RETURN, 0, 0, _error(answer))]
        for answer, table in answers
        for numbers in table.values()
        if (number := numbers[column]) is not None
    }


def build_filter(
    *,
    cgroup: bool,
    namespaces: bool = True,
    own_user: bool = True,
    landlock: int = _LANDLOCK_TRUNCATES,
    tcp: bool = False,
) -> bytes:
    """Build the filter as BPF.

    `cgroup=False` refuses `memfd_create`, whose memory is invisible without a cgroup; also shared anonymous memory if
    the program's processes cannot be inspected either, for lack of a pid namespace.
    `namespaces=False`: the network and the file tree are the host's.
    `own_user=False`: so is the user, who owns many of the files.
    `landlock`: its version. If the file tree is the host's, what that version does not cover is refused here.
    `tcp`: allow it in the program's own network namespace, where Landlock decides what it may connect to.
    """
    column = 0 if MACHINE == "x86_64" else 1
    cases: dict[int, list[Instruction]] = {}
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            cases[number] = [(_RETURN, 0, 0, _error(errno.EPERM))]
    absent = [*_ABSENT.values(), *([] if cgroup else [_MEMFD_CREATE])]
    for numbers in absent:
        number = numbers[column]
        if number is not None:
            cases[number] = [(_RETURN, 0, 0, _error(errno.ENOSYS))]
    special = _special_cases() if namespaces else {**_special_cases(), **_without_network_namespace()}
    if tcp:
        special |= _with_tcp()
    cases.update({numbers[column]: body for numbers, body in special.items()})
    if not namespaces:
        cases.update(_without_private_root(column, own_user=own_user))
        if landlock < _LANDLOCK_TRUNCATES:
            cases.update(_without_truncation(column))
        if not cgroup:
            cases[_MMAP[column]] = _counted_memory_only()
        del cases[LANDLOCK_RESTRICT_SELF]  # a program restricts itself before its first line: see `program.prepare`
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # The x32 calls of x86_64 are a second, unfiltered way into the same kernel.
        (_JUMP_GREATER_EQUAL, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
        *_search(sorted(cases.items())),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
