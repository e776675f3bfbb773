"""Entry point of the programs' interpreter. It finds the package `guest`, which is not installed there.

`guest_main.py probe` prints what the machine supports; `guest_main.py HOST_PID CONTROL_FD` becomes a zygote.
"""

import sys

sys.path[0] = __file__.rpartition("/")[0]
if sys.argv[1] == "probe":
    import json

    from guest.probe import probe  # pyright: ignore

    print(json.dumps(probe()))  # noqa: T201
else:
    from guest.zygote import main  # pyright: ignore

    del sys.path[0]
    main()
