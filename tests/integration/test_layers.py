"""The import direction the layout promises: proto ← engines, consumers, indexer ← scripts, __main__; no cycles."""

from __future__ import annotations

import ast
from pathlib import Path

import metatrie
import pytest

ROOT = Path(metatrie.__file__).parent
ALLOWED = {
    "proto": {"proto"},
    "engines": {"engines", "proto"},
    "consumers": {"consumers", "proto"},
    "indexer": {"indexer", "proto"},
    "scripts": {"scripts", "consumers", "engines", "indexer", "proto"},
}


def imports(path: Path) -> set[str]:
    """Dotted names below `metatrie` that a module imports, at whatever level of it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            if not node.level and not (node.module or "").startswith("metatrie"):
                continue
            module = (node.module or "").removeprefix("metatrie").strip(".") if not node.level else node.module or ""
            target = [*base, *filter(None, module.split("."))]
            for alias in node.names:
                deeper = ROOT.joinpath(*target, alias.name)
                found.add(".".join([*target, alias.name] if deeper.with_suffix(".py").exists() else target))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("metatrie.") for a in node.names if a.name.startswith("metatrie.")}
    return found


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): imports(path)
    for folder in ALLOWED
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(folder: str) -> None:
    wrong = {
        f"{module} imports {target}"
        for module, targets in MODULES.items()
        if module.startswith(f"{folder}.")
        for target in targets
        if target.split(".")[0] not in ALLOWED[folder] | {""}
    }
    assert not wrong


def test_there_is_no_import_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' → '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        for target in MODULES.get(module, ()):
            if target in MODULES and target != module:
                visit(target, (*path, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())
    assert len(done) >= len(MODULES)
