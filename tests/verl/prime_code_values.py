"""What verl's prime_code says of answers, in a process of its own: it forks, and changes the process it runs in.

Reads lines of JSON, [completion, test cases, continuous], and writes a line for each: the score, or the exception's
name.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from verl.utils.reward_score import prime_code


def score(completion: str, tests: str, continuous: bool) -> float | str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return float(prime_code.compute_score(completion, tests, continuous)[0])
        except Exception as error:
            return type(error).__name__


if __name__ == "__main__":
    for line in sys.stdin:
        completion, tests, continuous = json.loads(line)
        print(json.dumps(score(completion, json.dumps(tests), continuous)), flush=True)
