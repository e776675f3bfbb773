"""Files: how much a program can write, and what can be smuggled in and out with them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from hostile import content_of, open_to_everybody, run, words
from ways import Session, Way

from patience import patient
from toolyard.errors import ProgramError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")
namespaces = pytest.mark.kernel("namespaces")

EVERYWHERE = ("/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/data")


# ------------------------------------------------------------------------------------------------------------- too much
@pytest.mark.parametrize("size", [1 * MIB, 64 * MIB], ids=["many files", "one file"])
async def test_a_full_disk_is_a_verdict(any_level: LocalSandbox, size: int) -> None:
    execution = await run(
        any_level,
        f"""
        import itertools
        for number in itertools.count():
            with open(f"fill-{{number}}", "wb") as file:
                for _ in range({size} // 65536):
                    file.write(b"x" * 65536)
        """,
        disk_bytes=32 * MIB,
        memory_bytes=512 * MIB,
        run_seconds=20,
    )
    assert execution.verdict is Verdict.DISK_EXCEEDED


@namespaces
async def test_all_writable_directories_share_one_limit(full_way: Way) -> None:
    execution = await run(
        full_way,
        f"""
        for place in {EVERYWHERE}:
            with open(place + "/fill", "wb") as file:
                file.write(b"x" * (8 << 20))
        import time; time.sleep(5)
        """,
        disk_bytes=32 * MIB,
        memory_bytes=512 * MIB,
    )
    assert execution.verdict is Verdict.DISK_EXCEEDED


@namespaces
async def test_the_sandbox_itself_never_holds_more_than_its_disk(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        """
        try:
            for number in range(10):
                with open(f"fill-{number}", "wb") as file:
                    file.write(b"x" * (100 << 20))
        except OSError as error:
            print(error.strerror)
        """,
        disk_bytes=256 * MIB,
        memory_bytes=1024 * MIB,
    )
    assert execution.stdout == "No space left on device\n" or execution.verdict is Verdict.DISK_EXCEEDED


async def test_a_single_file_ends_at_its_limit(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        try:
            with open("large", "wb") as file:
                file.truncate(4 << 20)
                file.seek(4 << 20)
                file.write(b"x")
                file.flush()
        except OSError as error:
            print(error.strerror)
        """,
        file_bytes=4 * MIB,
    )
    assert execution.stdout == "File too large\n"


@namespaces
async def test_inodes_run_out_inside_the_program_only(full_way: Way) -> None:
    execution = await run(
        full_way,
        """
        count = 0
        try:
            while count < 1_000_000:
                open(f"/tmp/{count}", "w").close()
                count += 1
        except OSError as error:
            print(error.strerror, count < 40_000)
        """,
        run_seconds=20,
    )
    assert execution.stdout == "No space left on device True\n"
    assert (await run(full_way, "open('a', 'w').write('b'); print(open('a').read())")).stdout == "b\n"


async def test_files_without_end_are_a_verdict_where_nothing_counts_inodes(confined: LocalSandbox) -> None:
    execution = await run(
        confined,
        """
        import itertools
        for number in itertools.count():
            open(f"{number}", "w").close()
        """,
        run_seconds=60,
    )
    assert execution.verdict is Verdict.DISK_EXCEEDED


@namespaces
async def test_deleted_files_that_are_still_open_fill_the_disk_too(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        """
        import os, time
        kept = []
        for number in range(64):
            kept.append(open("deleted", "wb", buffering=0))
            kept[-1].write(b"x" * (1 << 20))
            os.remove("deleted")
        time.sleep(5)
        """,
        disk_bytes=32 * MIB,
        memory_bytes=512 * MIB,
    )
    assert execution.verdict is Verdict.DISK_EXCEEDED


@pytest.mark.parametrize("way", ["deep down", "where nobody may list", "behind closed doors"])
async def test_what_fills_the_disk_cannot_be_hidden(any_level: LocalSandbox, way: str) -> None:
    execution = await run(
        any_level,
        f"""
        import os, time
        way = {way!r}
        if way == "deep down":
            for _ in range(3000):
                os.mkdir("d")
                os.chdir("d")
        if way == "where nobody may list":
            os.mkdir("d", 0o300)
            os.chdir("d")
        if way == "behind closed doors":
            os.mkdir("d")
            os.chdir("d")
        for number in range(64):
            with open(str(number), "wb") as file:
                file.write(b"x" * (1 << 20))
            if way == "behind closed doors" and number == 16:
                os.chmod(".", 0o300)
        time.sleep(5)
        """,
        disk_bytes=32 * MIB,
        memory_bytes=512 * MIB,
    )
    assert execution.verdict is Verdict.DISK_EXCEEDED


async def test_open_files_run_out_inside_the_program_only(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import os
        count = 0
        try:
            while True:
                os.dup(1)
                count += 1
        except OSError as error:
            print(error.strerror, count)
        """,
        open_files=64,
    )
    reason, count = execution.stdout.rsplit(maxsplit=1)
    assert reason == "Too many open files"
    assert int(count) in ({61} if not isinstance(any_way, Session) else {59}), "a session has two more, for its cells"
    assert (await run(any_way, "print(1)")).stdout == "1\n"


async def test_the_limits_cannot_be_raised(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import resource
        for name in ("CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "MEMLOCK", "NICE", "RTPRIO"):
            kind = getattr(resource, "RLIMIT_" + name)
            before = resource.getrlimit(kind)
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            except (OSError, ValueError):
                pass
            if resource.getrlimit(kind)[1] != before[1]:
                print(name, "was raised")
        """,
    )
    assert execution.ok
    assert execution.stdout == ""


# -------------------------------------------------------------------------------------------------------- awkward trees
AWKWARD = {
    "a tree of 4000 levels": """
        import os
        for _ in range(4000):
            os.mkdir("d")
            os.chdir("d")
        open("leaf", "w").close()
        """,
    "names that are no text": r"""
        import os
        for name in (b"new\nline", b"\xff\xfe", b"-rf *", b" ", b"'\"", b"\x01\x1b[2J", b"n" * 255):
            open(os.path.join(b".", name), "w").close()
            os.mkdir(os.path.join(b".", name + b"d") if len(name) < 255 else b"d" * 255)
        """,
    "directories nobody may enter": """
        import os, tempfile
        os.makedirs("a/b/c")
        open("a/b/c/file", "w").close()
        for path in ("a/b/c/file", "a/b/c", "a/b", "a", tempfile.gettempdir(), "."):
            try:
                os.chmod(path, 0)
            except OSError:
                pass  # where the directory is not its own
        """,
    "files behind a thousand hard links": """
        import os
        open("a", "w").close()
        for number in range(1000):
            os.link("a", f"link-{number}")
        """,
    "a program that removes itself and its directory's contents": """
        import os, shutil
        for name in os.listdir("."):
            os.remove(name)
        """,
    "a directory in place of the program": """
        import os
        os.remove("main.py")
        os.makedirs("main.py/a/b")
        """,
    "a link in place of the program": """
        import os
        os.remove("main.py")
        os.symlink("/etc/passwd", "main.py")
        """,
    "files that are held open, locked and deleted": """
        import fcntl, os
        kept = open("kept", "w")
        fcntl.flock(kept, fcntl.LOCK_EX)
        os.remove("kept")
        handle = os.open(".", os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fork() == 0:
            import time; time.sleep(60)
        """,
    "pipes, sockets and links": """
        import os, socket
        os.mkfifo("pipe")
        try:
            socket.socket(socket.AF_UNIX).bind("socket")
        except OSError:
            pass
        os.symlink("loop", "loop")
        os.symlink("..", "up")
        """,
}


@pytest.mark.parametrize("tree", AWKWARD)
async def test_nothing_remains_of(any_way: Way, tree: str) -> None:
    execution = await run(any_way, AWKWARD[tree])
    # Where trees are walked to know their size, one too deep for that counts as a full disk.
    assert execution.ok or execution.verdict is Verdict.DISK_EXCEEDED, execution
    for _ in range(2):  # both workers
        left = await run(
            any_way,
            """
            import os, sys, tempfile
            # An interpreter that lies below /tmp, or another such place, is bound there for good.
            BOUND = sys.prefix.removeprefix("/var").split("/")[2]
            for place in (".", tempfile.gettempdir(), "/dev/shm", "/var/tmp", "/mnt", "/data"):
                try:
                    print(*[name for name in os.listdir(place) if name not in ("main.py", BOUND)], end="")
                except OSError:
                    pass
            open("new", "w").close()
            """,
        )
        assert left.ok
        assert left.stdout == ""


# ------------------------------------------------------------------------------------------------------------- files in
@pytest.mark.any_user
@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "..", "", "a/", "a\0b", "/../etc/passwd"])
async def test_a_file_name_that_leaves_the_directory_is_refused(any_level: LocalSandbox, name: str) -> None:
    with pytest.raises(ProgramError, match="file"):
        await run(any_level, "print(1)", files={name: b"x"})


@pytest.mark.parametrize("name", ["/etc/passwd", "/usr/escaped", "/proc/sys/kernel/hostname", "/escaped", "/dev/null"])
async def test_an_absolute_name_writes_nothing_on_the_host(any_way: Way, name: str) -> None:
    before = content_of(name)
    with contextlib.suppress(ProgramError):
        await run(any_way, "print(1)", files={name: b"escaped"})
    assert content_of(name) == before


@namespaces
async def test_an_absolute_name_lands_in_the_runs_own_root(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "print(open('/data/in').read()); open('/data/out', 'w').write('back')",
        files={"/data/in": b"forth"},
        fetch_files=["/data/out", "/data/in"],
    )
    assert execution.stdout == "forth\n"
    assert dict(execution.files) == {"/data/out": b"back", "/data/in": b"forth"}


@pytest.mark.any_user
async def test_file_names_that_are_odd_but_honest_work(any_level: LocalSandbox) -> None:
    files = {"new\nline": b"1", "sp ace": b"2", "ünïcode": b"3", "-dash": b"4", "a/b/c/d": b"5", "..dots": b"6"}
    execution = await run(any_level, "", files=files, fetch_files=list(files))
    assert dict(execution.files) == files


# ------------------------------------------------------------------------------------------------------------ files out
async def test_only_regular_files_come_back(any_way: Way, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    open_to_everybody(secret)
    execution = await run(
        any_way,
        f"""
        import os, socket
        os.symlink("/etc/passwd", "absolute")
        os.symlink({str(secret)!r}, "secret")
        os.symlink("real", "inside")
        os.symlink("/", "root")
        os.symlink("..", "up")
        os.symlink("/proc/self/environ", "environ")
        os.mkfifo("pipe")
        os.makedirs("folder/inner")
        with open("real", "w") as file:
            file.write("real")
        for target, link in (("/etc/passwd", "hard"), ({str(secret)!r}, "hard secret"), ("/usr/bin/env", "hard env")):
            try:
                os.link(target, link)
            except OSError:
                pass
        try:
            os.mknod("device", 0o60600, os.makedev(8, 0))
        except OSError:
            pass
        """,
        fetch_files=[
            "absolute", "secret", "inside", "root/etc/passwd", "up/etc/passwd", "environ", "pipe", "folder", "hard",
            "hard secret", "hard env", "device", "real", "missing", "folder/inner",
        ],
    )  # fmt: skip
    assert execution.ok, execution
    assert dict(execution.files) == {"real": b"real"}


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..", "../", "a/../../../etc/passwd", "/etc/shadow", "/proc/1/environ", "/", "/root/", ""],
)
async def test_a_name_outside_brings_nothing_back(any_way: Way, name: str) -> None:
    began = time.monotonic()
    execution = await run(any_way, "open('mine', 'w').write('mine')", fetch_files=[name, "mine"])
    assert execution.ok
    assert execution.files["mine"] == b"mine"
    assert set(execution.files) <= {"mine", "main.py", "/sandbox/mine"}
    assert time.monotonic() - began < patient(10)


async def test_host_files_do_not_come_back_under_absolute_names(any_way: Way, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host secret")
    open_to_everybody(tmp_path / "secret")
    names = [str(tmp_path / "secret"), __file__, "/etc/hostname", "/proc/self/environ", str(Path.home() / ".bashrc")]
    execution = await run(any_way, "", fetch_files=names)
    assert not any(b"host secret" in content or b"pytest" in content for content in execution.files.values())
    assert set(execution.files) <= {"/etc/hostname"}


@pytest.mark.any_user
async def test_large_outputs_are_bounded_and_the_rest_still_comes(any_level: LocalSandbox) -> None:
    execution = await run(
        any_level,
        """
        for name, size in (("huge", 80 << 20), ("small", 5)):
            with open(name, "wb") as file:
                file.truncate(size)
        """,
        fetch_files=["huge", "small"],
        disk_bytes=256 * MIB,
    )
    assert execution.ok
    assert dict(execution.files) == {"small": bytes(5)}


@pytest.mark.any_user
async def test_a_deep_tree_asked_back_as_a_whole_is_no_failure_of_ours(any_level: LocalSandbox) -> None:
    execution = await run(any_level, AWKWARD["a tree of 4000 levels"], fetch_files=["d/", "d/d/d", "x"])
    assert execution.ok or execution.verdict is Verdict.DISK_EXCEEDED
    assert (await run(any_level, "print(1)")).stdout == "1\n"


@pytest.mark.any_user
async def test_binary_contents_come_back_as_they_were(any_level: LocalSandbox) -> None:
    content = bytes(range(256)) * 5000
    execution = await run(
        any_level, "open('out', 'wb').write(open('in', 'rb').read())", files={"in": content}, fetch_files=["out"]
    )
    assert execution.files["out"] == content


# ---------------------------------------------------------------------------------------------------- read-only view
async def test_host_files_cannot_be_changed(any_way: Way, tmp_path: Path) -> None:
    """Not their contents, nor their mode, owner, times or attributes, which Landlock alone does not guard."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    open_to_everybody(victim)
    before = victim.stat()
    told = await words(
        any_way,
        f"""
        place = {str(victim)!r}
        print(attempt(open, place, "r+"), attempt(open, place, "ab"), attempt(open, place))
        print(attempt(os.truncate, place, 0))
        print(attempt(os.unlink, place), attempt(os.rename, place, place + "2"), attempt(os.link, place, "here"))
        print(attempt(open, place + ".new", "w"), attempt(os.mkdir, place + ".d"))
        print(attempt(os.symlink, "a", place + ".l"))
        for change in (
            lambda: os.chmod(place, 0o777), lambda: os.chown(place, -1, os.getgid()), lambda: os.utime(place),
            lambda: os.utime(place, (1, 1)), lambda: os.setxattr(place, "user.mark", b"1"),
            lambda: os.chmod(os.path.dirname(place), 0o777), lambda: os.utime(os.path.dirname(place), (1, 1)),
            lambda: os.chmod(os.open(place, os.O_PATH), 0o777),
        ):
            attempt(change)
        """,
    )
    assert set(told) <= {"EROFS", "EACCES", "EPERM", "ENOENT", "EXDEV"}
    after = victim.stat()
    assert victim.read_text() == "as it was"
    assert after == before or (after.st_atime_ns != before.st_atime_ns and after[:7] == before[:7])
    assert (after.st_mode, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert os.listxattr(victim) == []
    assert os.listdir(tmp_path) == ["victim"]


async def test_the_interpreter_and_the_system_cannot_be_written(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        import json
        places = [json.__file__, "/usr/bin/env", "/bin/sh", os.path.dirname(json.__file__) + "/planted.py",
                  "/usr/lib/planted", "/planted", "/etc/planted"]
        for place in places:
            print(attempt(os.open, place, os.O_RDWR), attempt(os.open, place, os.O_WRONLY | os.O_APPEND))
            print(attempt(os.open, place + ".planted", os.O_WRONLY | os.O_CREAT))
        """,
    )
    # The last one: a program that runs on the host at the moment, which the kernel checks before the sandbox's rules.
    assert set(told) <= {"EROFS", "EACCES", "EPERM", "ENOENT", "ETXTBSY"}
