"""What stands in the place of metrics, display and saver on all ranks but the first, which does all of it."""

from typing import Any


class Silent:
    """Writes and shows nothing; `lines` and `due` are told by the first rank."""

    lines: tuple[dict[str, Any], ...] = ()
    needs_report = False

    def write(self, line: dict[str, Any]) -> None: ...

    def show(self, line: dict[str, Any]) -> None: ...

    def due(self, step: int) -> bool:
        return False

    def begin(self, step: int) -> None: ...

    def reported(self, step: int, good: bool) -> None: ...
