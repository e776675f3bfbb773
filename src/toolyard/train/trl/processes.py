"""The processes of one run, as `accelerate launch` or `torchrun` started them; one, if nobody did."""

from __future__ import annotations

from typing import Any, Self

import accelerate  # pyright: ignore[reportMissingTypeStubs]

_accelerate: Any = accelerate


class Processes:
    """Who we are among them. What one of them waits for, all have to come to."""

    def __init__(self, *, cpu: bool) -> None:
        joined_before: bool = _accelerate.PartialState._shared_state != {}  # noqa: SLF001  (nobody else knows)
        self._state = _accelerate.PartialState(cpu=cpu)
        self.count: int = self._state.num_processes
        self.is_main: bool = self._state.is_main_process
        self._joined_here = self.count > 1 and not joined_before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Part from the others, if it was here that we joined them. After an error, they may not come to it: then the
        end of the process has to do."""
        if self._joined_here and kind is None:
            self._state.destroy_process_group()

    def agreed(self, mine: Any) -> Any:
        """What the main process says. Nobody goes on before it has."""
        if self.count == 1:
            return mine
        said = [mine]
        _accelerate.utils.broadcast_object_list(said)
        return said[0]

    def gathered(self, mine: Any) -> list[Any]:
        """What each says, in their order."""
        if self.count == 1:
            return [mine]
        return _accelerate.utils.gather_object([mine])
