"""Sessions over the command lines; all share one environment, made once, so torch is installed once."""

from __future__ import annotations

import hashlib
import sys
import venv
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests", "proofs"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".nox" / "shared"
COMPILE = """
import compileall, sysconfig
for name in ("torch", "sympy", "numpy", "hypothesis", "rich"):
    compileall.compile_dir(f"{sysconfig.get_path('purelib')}/{name}", quiet=2, workers=0)
"""


def python(session: nox.Session, *arguments: str) -> None:
    """Run the shared environment's Python, making the environment when it is missing or its requirements changed."""
    executable = str(ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
    requirements = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    wanted = hashlib.sha256(requirements + sys.version.encode()).hexdigest()
    stamp = ENVIRONMENT / "requirements.sha256"
    if not stamp.is_file() or stamp.read_text() != wanted:
        session.log("making the shared environment (torch included)")
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        # Pip compiles everything on one core; on all of them the large packages take a third of that time, and the
        # rest is compiled when it is first imported.
        install = ["install", "-q", "--no-compile", "-c", "constraints.txt", "-e", ".[dev]"]
        session.run(executable, "-m", "pip", *install, external=True)
        session.run(executable, "-c", COMPILE, external=True, silent=True)
        stamp.write_text(wanted)
    session.run(executable, *arguments, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff over everything."""
    python(session, "-m", "ruff", "check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over the packages that pyproject.toml lists."""
    python(session, "-m", "mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The harness's own tests: nox -s tests -- -k resume."""
    python(session, "-m", "pytest", *session.posargs)


@nox.session
def proofs(session: nox.Session) -> None:
    """Prove every variant and attack with every adversary, or a choice: nox -s proofs -- --device cuda."""
    if session.posargs:
        python(session, "-m", "proofs", *session.posargs)
        return
    ledger = session.create_tmp()
    python(session, "-m", "proofs", "--all", "--ledger", ledger)
    python(session, "-m", "proofs", "--recipe", "production", "--ledger", ledger)
    python(session, "-m", "proofs", "--adversaries", "--ledger", ledger)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: nox -s bench -- --suite attention --quick."""
    python(session, "-m", "benchmarks", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Tables and plots from the records."""
    python(session, "-m", "reports", "build", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """What a merge has to pass: proofs current, tables generated, no ratio worse than recorded."""
    python(session, "-m", "reports", "gate", *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Tokenize real text, prove the variants, train a small Fractus with them and say what was done."""
    python(session, "-m", "trainer", "quickstart", *session.posargs)
