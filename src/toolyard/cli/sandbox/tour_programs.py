"""The tour that `make demo` takes: programs that behave, fail, loop, overeat and attack, and how each must end."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from toolyard.sandbox.protocol import MIB, Limits, Program, Verdict


@dataclass(frozen=True, slots=True)
class TourStop:
    """One program of the tour and the verdict that is right for it."""

    title: str
    story: str
    program: Program
    limits: Limits
    expected: Verdict
    harmful: bool = False
    """Would hurt the machine if the walls did not hold: to be left out where isolation is below `namespaces`."""


_EASY = Limits(run_seconds=5, compile_seconds=20)


def _stop(
    title: str, story: str, language: str, code: str, expected: Verdict = Verdict.OK, limits: Limits = _EASY
) -> TourStop:
    return TourStop(title, story, Program(dedent(code).lstrip(), language), limits, expected)


STOPS: tuple[TourStop, ...] = (
    _stop(
        "Python, well behaved",
        "Counts the primes below ten thousand and goes home.",
        "python",
        """
        primes = [n for n in range(2, 10_000) if all(n % d for d in range(2, int(n**0.5) + 1))]
        print(len(primes), "primes, the last is", primes[-1])
        """,
    ),
    _stop(
        "Bash pipeline",
        "Six old friends hold hands in a pipe.",
        "bash",
        """
        printf '%s\\n' pipe grep sort uniq wc awk | sort | tr '\\n' ' '
        echo
        """,
    ),
    _stop(
        "C",
        "Knows a closed form for pi, and is proud of it.",
        "c",
        """
        #include <math.h>
        #include <stdio.h>

        int main(void) { printf("pi is about %.10f\\n", acos(-1.0)); }
        """,
    ),
    _stop(
        "C++",
        "Sorts its words and says them in order.",
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
        "Promises to answer, and keeps the promise.",
        "nodejs",
        """
        const later = (value) => new Promise((resolve) => setTimeout(() => resolve(value), 5));
        Promise.all([6, 7].map(later)).then(([a, b]) => console.log("the answer is", a * b));
        """,
    ),
    _stop(
        "Go",
        "Sends ten gophers through one channel.",
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
        "Its class is not called Main, and nobody minds.",
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
        "Borrows a string and gives it back reversed.",
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
        "Looks like line noise, works like a charm.",
        "perl",
        """
        my %seen;
        $seen{$_}++ for split //, "mississippi";
        print join(" ", map { "$_$seen{$_}" } sort keys %seen), "\\n";
        """,
    ),
    _stop(
        "Divides by zero",
        "Tries what every program tries once.",
        "python",
        """
        def share(cake, guests):
            return cake / guests

        print(share(1, 0))
        """,
        Verdict.FAILED,
    ),
    _stop(
        "Follows a wild pointer",
        "Writes a letter to nobody, at address zero.",
        "c",
        """
        #include <stddef.h>

        int main(void) {
            volatile int *nobody = NULL;
            *nobody = 42;
        }
        """,
        Verdict.SIGNALED,
    ),
    _stop(
        "Does not compile",
        "Forgot a header; the compiler did not.",
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
        "Says what it thinks, then thinks for ever; the words are kept.",
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
        "Burns its fuel",
        "Has plenty of time, but only half a second of processor.",
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
        "Eats the memory",
        "Orders sixteen megabytes, and again, and again.",
        "python",
        """
        plates = []
        while True:
            plates.append(b"x" * (16 << 20))
        """,
        Verdict.MEMORY_EXCEEDED,
        Limits(run_seconds=5, memory_bytes=192 * MIB),
    ),
    _stop(
        "Fork bomb",
        "Every child has children, until the nursery is full.",
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
        "Has one thing to say, and says it without end.",
        "bash",
        "yes 'and another thing'",
        Verdict.OUTPUT_EXCEEDED,
        Limits(run_seconds=5, flood_bytes=4 * MIB),
    ),
    _stop(
        "Leaves a daemon behind",
        "Exits politely, with a friend hiding in the background; the friend leaves, too.",
        "python",
        """
        import os, time

        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        print("nobody here but me")
        """,
    ),
    _stop(
        "Looks for secrets",
        "Rattles at every drawer of the host, and finds them empty.",
        "python",
        """
        import glob, os, sys

        loot = []
        for pattern in ("/etc/shadow", "/root/.*", "/home/*/.*", "/proc/[0-9]*/environ", "/var/lib/*/*"):
            for path in glob.glob(pattern):
                try:
                    mine = os.path.dirname(path) == f"/proc/{os.getpid()}"
                    if os.path.isfile(path) and not mine and open(path, "rb").read(1):
                        loot.append(path)
                except OSError:
                    pass
        print("found", loot or "nothing")
        sys.exit(bool(loot))
        """,
    ),
    _stop(
        "Phones home",
        "Dials the world, the host and the neighbours; the line is dead.",
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
        print("reached", answered or "nobody")
        sys.exit(bool(answered))
        """,
    ),
    _stop(
        "Carves its name",
        "Tries to leave a note in the system's own walls.",
        "bash",
        """
        for place in /usr/bin /usr/local/bin /lib /etc/alternatives; do
            if (echo "was here" > "$place/toolyard-was-here") 2>/dev/null; then
                rm -f "$place/toolyard-was-here"
                carved="$carved $place"
            fi
        done
        echo "carved:${carved:- nothing}"
        [ -z "$carved" ]
        """,
    ),
    TourStop(
        "Kills everybody",
        "Pulls the trigger on every process it can see, and is alone afterwards, as before.",
        Program(
            "import os, signal\n\n"
            "try:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError as error:\n    print('nobody to kill:', error)\n"
            "print('still standing')\n"
        ),
        _EASY,
        Verdict.OK,
        harmful=True,
    ),
)
