"""The programs of `toolyard sandbox tour`: correct, failing, endless, greedy and hostile, and how each must end."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from toolyard.sandbox.protocol import MIB, Limits, Program, Verdict


@dataclass(frozen=True, slots=True)
class TourStop:
    """One program of the tour and its expected verdict."""

    title: str
    story: str
    program: Program
    limits: Limits
    expected: Verdict
    harmful: bool = False
    """It would harm the machine if isolation failed: skipped at levels below `namespaces`."""


_DEFAULT_LIMITS = Limits(run_seconds=5, compile_seconds=20)


def _stop(
    title: str, story: str, language: str, code: str, expected: Verdict = Verdict.OK, limits: Limits = _DEFAULT_LIMITS
) -> TourStop:
    return TourStop(title, story, Program(dedent(code).lstrip(), language), limits, expected)


STOPS: tuple[TourStop, ...] = (
    _stop(
        "Python, well behaved",
        "Counts the primes below 10,000.",
        "python",
        """
        primes = [n for n in range(2, 10_000) if all(n % d for d in range(2, int(n**0.5) + 1))]
        print(len(primes), "primes, the last is", primes[-1])
        """,
    ),
    _stop(
        "Bash pipeline",
        "Sorts six words in a pipe.",
        "bash",
        """
        printf '%s\\n' pipe grep sort uniq wc awk | sort | tr '\\n' ' '
        echo
        """,
    ),
    _stop(
        "C",
        "Computes pi with the math library.",
        "c",
        """
        #include <math.h>
        #include <stdio.h>

        int main(void) { printf("pi is about %.10f\\n", acos(-1.0)); }
        """,
    ),
    _stop(
        "C++",
        "Sorts a vector of words.",
        "cpp",
        """
        #include <algorithm>
        #include <iostream>
        #include <string>
        #include <vector>

        int main() {
            std::vector<std::string> words{"templates", "are", "only", "macros", "with", "a", "tie"};
            std::sort(words.begin(), words.end());
            for (const auto& word : words) std::cout << word << ' ';
            std::cout << '\\n';
        }
        """,
    ),
    _stop(
        "Node.js",
        "Waits for two promises and multiplies their values.",
        "nodejs",
        """
        const later = (value) => new Promise((resolve) => setTimeout(() => resolve(value), 5));
        Promise.all([6, 7].map(later)).then(([a, b]) => console.log("the answer is", a * b));
        """,
    ),
    _stop(
        "Go",
        "Sums what ten goroutines send through a channel.",
        "go",
        """
        package main

        import "fmt"

        func main() {
            gophers := make(chan int)
            for i := 1; i <= 10; i++ {
                go func(n int) { gophers <- n }(i)
            }
            sum := 0
            for i := 0; i < 10; i++ {
                sum += <-gophers
            }
            fmt.Println("gophers add up to", sum)
        }
        """,
    ),
    _stop(
        "Java",
        "Its class is not called Main, and need not be.",
        "java",
        """
        import java.util.stream.IntStream;

        public class Teapot {
            public static void main(String[] args) {
                System.out.println("1 + ... + 100 = " + IntStream.rangeClosed(1, 100).sum());
            }
        }
        """,
    ),
    _stop(
        "Rust",
        "Reverses a string.",
        "rust",
        """
        fn reversed(text: &str) -> String {
            text.chars().rev().collect()
        }

        fn main() {
            println!("{}", reversed("reliver"));
        }
        """,
    ),
    _stop(
        "Perl",
        "Counts the letters of a word.",
        "perl",
        """
        my %seen;
        $seen{$_}++ for split //, "mississippi";
        print join(" ", map { "$_$seen{$_}" } sort keys %seen), "\\n";
        """,
    ),
    _stop(
        "Divides by zero",
        "Raises an exception; its traceback is kept.",
        "python",
        """
        def divide(a, b):
            return a / b

        print(divide(1, 0))
        """,
        Verdict.FAILED,
    ),
    _stop(
        "Null pointer",
        "Writes to address zero and crashes.",
        "c",
        """
        #include <stddef.h>

        int main(void) {
            volatile int *pointer = NULL;
            *pointer = 42;
        }
        """,
        Verdict.SIGNALED,
    ),
    _stop(
        "Does not compile",
        "Lacks an #include; the compiler's message is kept.",
        "cpp",
        """
        int main() {
            std::cout << "almost" << std::endl;
        }
        """,
        Verdict.COMPILE_FAILED,
    ),
    _stop(
        "Never ends",
        "Prints a line, then loops forever; the line is kept.",
        "python",
        """
        print("just a moment ...", flush=True)
        while True:
            pass
        """,
        Verdict.TIMED_OUT,
        Limits(run_seconds=1),
    ),
    _stop(
        "Uses up its CPU time",
        "May run for 5 seconds, but use only half a second of CPU time.",
        "python",
        """
        n = 1
        while True:
            n = n * 31 % 1_000_003
        """,
        Verdict.CPU_EXCEEDED,
        Limits(run_seconds=5, cpu_seconds=0.5),
    ),
    _stop(
        "Uses up its memory",
        "Allocates 16 MiB at a time, without end.",
        "python",
        """
        blocks = []
        while True:
            blocks.append(b"x" * (16 << 20))
        """,
        Verdict.MEMORY_EXCEEDED,
        Limits(run_seconds=5, memory_bytes=192 * MIB),
    ),
    _stop(
        "Fork bomb",
        "Every process forks, until the process limit.",
        "python",
        """
        import os

        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        Verdict.TIMED_OUT,
        Limits(run_seconds=1, processes=32),
    ),
    _stop(
        "Floods the output",
        "Prints the same line without end.",
        "bash",
        "yes 'and another thing'",
        Verdict.OUTPUT_EXCEEDED,
        Limits(run_seconds=5, flood_bytes=4 * MIB),
    ),
    _stop(
        "Leaves a daemon behind",
        "Exits, but leaves a process in the background; it is killed.",
        "python",
        """
        import os, time

        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        print("the parent exits")
        """,
    ),
    _stop(
        "Looks for secrets",
        "Tries to read private files of the host, and finds none.",
        "python",
        """
        import glob, os, sys

        readable = []
        for pattern in ("/etc/shadow", "/root/.*", "/home/*/.*", "/proc/[0-9]*/environ", "/var/lib/*/*"):
            for path in glob.glob(pattern):
                try:
                    mine = os.path.dirname(path) == f"/proc/{os.getpid()}"
                    if os.path.isfile(path) and not mine and open(path, "rb").read(1):
                        readable.append(path)
                except OSError:
                    pass
        print("found", readable or "nothing")
        sys.exit(bool(readable))
        """,
    ),
    _stop(
        "Phones home",
        "Tries to connect to the internet and the host; there is no network.",
        "python",
        """
        import socket, sys

        answered = []
        for address in (("1.1.1.1", 53), ("127.0.0.1", 22), ("127.0.0.1", 8080)):
            try:
                socket.create_connection(address, timeout=0.2).close()
                answered.append(address)
            except OSError:
                pass
        print("reached", answered or "nothing")
        sys.exit(bool(answered))
        """,
    ),
    _stop(
        "Writes to system folders",
        "Tries to write to /usr, /lib and /etc.",
        "bash",
        """
        for place in /usr/bin /usr/local/bin /lib /etc/alternatives; do
            if (echo "was here" > "$place/toolyard-was-here") 2>/dev/null; then
                rm -f "$place/toolyard-was-here"
                written="$written $place"
            fi
        done
        echo "written:${written:- nothing}"
        [ -z "$written" ]
        """,
    ),
    TourStop(
        "Kills all processes",
        "Sends SIGKILL to every process it can see: only its own.",
        Program(
            "import os, signal\n\n"
            "try:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError as error:\n    print('nobody to kill:', error)\n"
            "print('still standing')\n"
        ),
        _DEFAULT_LIMITS,
        Verdict.OK,
        harmful=True,
    ),
)
