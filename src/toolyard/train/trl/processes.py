"""The processes of one run, as started by `accelerate launch` or `torchrun`; otherwise one."""

from __future__ import annotations

from typing import Any, Self

import accelerate  # pyright: ignore[reportMissingTypeStubs]

_accelerate: Any = accelerate


class Processes:
    """This process's rank, and exchanges with the others. Every process must take part in every exchange."""

    def __init__(self, *, cpu: bool) -> None:
        joined_before: bool = _accelerate.PartialState._shared_state != {}  # noqa: SLF001  (there is no public way)
        self._state = _accelerate.PartialState(cpu=cpu)
        self.count: int = self._state.num_processes
        self.index: int = self._state.process_index
        self.is_main: bool = self._state.is_main_process
        self._joined_here = self.count > 1 and not joined_before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the process group if it was joined here. Not after an error: the others may never get here, and the end
        of the process suffices."""
        if self._joined_here and kind is None:
            self._state.destroy_process_group()

    def broadcast(self, mine: Any) -> Any:
        """The main process's value. Every process waits for it."""
        if self.count == 1:
            return mine
        said = [mine]
        _accelerate.utils.broadcast_object_list(said)
        return said[0]

    def gather(self, mine: Any) -> list[Any]:
        """The values of all processes, in order."""
        if self.count == 1:
            return [mine]
        return _accelerate.utils.gather_object([mine])
