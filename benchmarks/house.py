"""Rooms, floors and import arrows of a checkout, counted from its imports: python benchmarks/house.py [CHECKOUT].

A room is a folder of the package or a module beside them. An arrow goes from one room to another that some file of it
imports, at the top, in a function or for type checkers; `from package import name` is an arrow to `__init__`, whose own
imports only list public names and are not counted. A floor holds the rooms whose arrows all end on lower floors, as low
as they can lie; rooms in a circle have none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "robustkpca"


def imports(path: Path, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Dotted names that a file imports; `package`: the folder that relative imports start from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = (*base, *(node.module or "").split(".")) if node.module else base
            yield from ((*start, alias.name) for alias in node.names)


def arrows(checkout: Path) -> dict[str, set[str]]:
    """For each room the rooms that it imports."""
    root = checkout / NAME
    room_of = {path: path.relative_to(root).with_suffix("").parts[0] for path in sorted(root.rglob("*.py"))}
    wanted: dict[str, set[str]] = {room: set() for room in room_of.values()}
    for path, room in room_of.items():
        for name in imports(path, (NAME, *path.relative_to(root).parent.parts)):
            if name[0] == NAME and room != "__init__":
                wanted[room].add(name[1] if len(name) > 1 and name[1] in wanted else "__init__")
    return {room: below - {room} for room, below in wanted.items()}


def floors(wanted: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from the ground up; what is left in circles is left out."""
    left, found = dict(wanted), []
    while ground := sorted(room for room, below in left.items() if not below & left.keys()):
        found.append(ground)
        left = {room: below for room, below in left.items() if room not in ground}
    return found


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    wanted = arrows(checkout)
    stacked = floors(wanted)
    for number, rooms in reversed(list(enumerate(stacked))):
        print(f"{number:2}  {', '.join(rooms)}")
    circles = sorted(wanted.keys() - {room for rooms in stacked for room in rooms})
    print(f"{len(wanted)} rooms, {len(stacked)} floors, {sum(map(len, wanted.values()))} arrows")
    print(f"in circles: {', '.join(circles) or 'none'}")


if __name__ == "__main__":
    main()
