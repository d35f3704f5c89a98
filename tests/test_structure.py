"""The house: folders are the pipeline, and nothing imports upward."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import breakeven

ROOT = Path(breakeven.__file__).parent

#: What each part may import besides itself. The ground floor is whatever stands in no folder and is named here.
GROUND = {"errors", "clock", "records", "options", "runs", "host", "interrupts"}
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    "load": GROUND,
    "measure": GROUND,
    "engines": GROUND,
    "decide": GROUND | {"measure"},
    "act": {"errors", "decide"},
    "sim": GROUND | {"load", "measure", "decide"},
    "report": GROUND | {"measure", "decide", "sim"},
    "levels": GROUND | {"load"},
    "resuming": GROUND,
    "doctor": GROUND | {"load", "measure", "engines", "report", "levels"},
    "measurer": GROUND | {"load", "measure", "engines"},
    "arm": GROUND | {"load", "measure", "engines", "levels", "measurer", "__init__"},
    "sweep": GROUND | {"load", "measure", "engines", "report", "levels", "measurer"},
    "alternation": GROUND
    | {"load", "measure", "decide", "engines", "levels", "measurer", "arm", "sweep", "benchmark", "resuming", "report"}
    | {"finding"},
    "finding": GROUND | {"measure", "decide", "levels"},
    "versus": GROUND | {"measure", "decide", "engines", "report", "arm", "alternation", "benchmark"},
    "variants": GROUND,
    "tuning": GROUND | {"decide", "engines", "report", "variants", "versus"},
    "verifying": GROUND | {"decide", "versus"},
    "benchmark": GROUND | {"measure", "engines", "report", "levels", "doctor", "arm", "sweep", "resuming"},
}


def imports(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, without the package's name; imports for typing alone don't count."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            if module == "breakeven":
                yield "__init__"
            elif module.startswith("breakeven."):
                yield module.removeprefix("breakeven.")


def test_nothing_imports_upward() -> None:
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).with_suffix("").parts[0]
        if part in MAY_IMPORT:
            found = {module.split(".")[0] for module in imports(path)}
            assert found <= MAY_IMPORT[part] | {part}, f"{path.relative_to(ROOT)} imports upward"


def test_no_two_modules_import_each_other() -> None:
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]  # which imports when asked
    graph = {".".join(path.relative_to(ROOT).with_suffix("").parts): set(imports(path)) for path in files}
    circles = [(a, b) for a, others in graph.items() for b in others if b > a and a in graph.get(b, ())]
    assert not circles


#: What runs inside an engine's process, whose environment has the standard library and numpy.
POLICY = set("belief comeback modes observed policy prices probing schedule steptime trend yields".split())


def test_the_policy_imports_nothing_that_an_engine_lacks() -> None:
    for path in [ROOT / "decide" / f"{name}.py" for name in POLICY] + [ROOT / "errors.py"]:
        assert set(imports(path)) <= {f"decide.{name}" for name in POLICY} | {"errors"}, path
    acting = {f"decide.{name}" for name in POLICY} | {f"act.{path.stem}" for path in (ROOT / "act").glob("*.py")}
    for path in (ROOT / "act").glob("*.py"):
        assert set(imports(path)) <= acting | {"errors"}, path
    code = (
        "import sys, breakeven.act.vllm\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    plain, loaded = (
        set(subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout.split())
        for text in (code.replace("breakeven.act.vllm", "numpy"), code)
    )
    assert loaded - plain == {"breakeven"}


def test_public_names_exist_and_are_sorted() -> None:
    assert breakeven.__all__ == sorted(breakeven.__all__)
    for name in breakeven.__all__:
        assert getattr(breakeven, name) is not None


def test_every_module_says_what_it_offers() -> None:
    for path in ROOT.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            module = importlib.import_module("breakeven." + ".".join(path.relative_to(ROOT).with_suffix("").parts))
            assert all(hasattr(module, name) for name in module.__all__), path


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, breakeven.cli; print(*(n for n in ('numpy', 'asyncio', 'msgspec', 'uvloop') if n in sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert loaded.stdout.strip() == ""
