"""``python -m proofs``: exit codes, messages and files of plug-ins, crashes, hangs and bad usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import proofs.__main__ as command
from proofs.properties import carry
from registry import long

ROOT = Path(__file__).resolve().parent.parent
HEAD = "import os, sys, time\nimport torch, registry\nfrom fractus.operators.attention import cumsum\n"
VARIANT = "@registry.variant(operator='attention', name='{name}')\ndef {name}(q, k, v, carry):\n    {body}\n"
RIGHT = "return cumsum(q, k, v, carry)"
EXCLUSIVE = "y, s = cumsum(q, k, v, carry); return cumsum(q, k.roll(1, 1), v.roll(1, 1), carry)[0], s"


@pytest.fixture
def plugin(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(body: str, name: str = "mine", head: str = HEAD) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(head + VARIANT.format(name=name, body=body))
        return path

    return write


def run(*arguments: object) -> int:
    return command.main([str(a) for a in arguments] + ["--jobs", "1"])


def test_a_right_plugin_exits_0_and_a_wrong_one_1(plugin, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out.json"
    assert run("--plugin", plugin(RIGHT), "--dtype", "float32", "--property", "[fci]*", "--json", out) == 0
    document = json.loads(out.read_text())
    assert set(document) == {"schema_version", "environment", "records"}
    assert {r["status"] for r in document["records"]} == {"passed"}
    capsys.readouterr()
    assert run("--plugin", plugin(EXCLUSIVE, "exclusive"), "--dtype", "float32", "--property", "forward") == 1
    told = capsys.readouterr().out
    assert "attention/exclusive float32 forward: mismatch: y[" in told
    assert "case small" in told
    assert "times its budget" in told
    assert "reproduce: python -c" in told


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("print('passed'); sys.stdout.flush(); os._exit(0)", "crashed"),
        ("raise RuntimeError('no')", "crashed"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("time.sleep(60)", "timed_out"),
        ("os.write(max(map(int, os.listdir('/proc/self/fd')[:-1])), b'x'); return cumsum(q, k, v, carry)", "crashed"),
    ],
)
def test_no_verdict_from_the_process_is_a_failure(plugin, body: str, status: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out.json"
    arguments = ("--dtype", "float32", "--property", "forward", "--limit", "2", "--json", out)
    assert run("--plugin", plugin(body), *arguments) == 1
    assert [r["status"] for r in json.loads(out.read_text())["records"]] == [status]


def test_a_plugin_that_ends_while_it_loads_is_a_failure(plugin, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert run("--plugin", plugin(RIGHT, head=HEAD + "os._exit(0)\n")) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--operator", "attentoin"), "did you mean 'attention'"),
        (("--operator", "attention", "--variant", "chunkd"), "did you mean 'chunked'"),
        (("--property", "forwrd"), "did you mean 'forward'"),
        (("--device", "cuda"), "no CUDA device here for --device cuda"),
        (("--device", "tpu"), "is not cpu or cuda"),
        (("--plugin", "nowhere.py"), "no plug-in file nowhere.py"),
        (("--recipe", "prodution"), "did you mean 'production'"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: tuple[str, ...], says: str, capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert run(*arguments, "--ledger", tmp_path / "ledger") == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def broken(:\n", "line 1"),
        ("x = 1\n", "declares no variant"),
        (HEAD + VARIANT.format(name="m", body=RIGHT).replace("attention", "atention"), "did you mean 'attention'"),
        ("import no_such_module\n" + HEAD + VARIANT.format(name="m", body=RIGHT), "No module named 'no_such_module'"),
    ],
)
def test_a_file_that_is_no_plugin_exits_2(text: str, says: str, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "file.py"
    path.write_text(text)
    assert run("--plugin", path) == 2
    assert says in capsys.readouterr().err


def test_a_plugin_may_bring_an_operator(tmp_path: Path) -> None:
    path = tmp_path / "doubling.py"
    path.write_text(
        """
import torch, registry
def cases():
    return (registry.Case(name="small", kind="small", sizes={"N": 5}),)
def draw(case, generator, dtype):
    return {"x": torch.randn(case.sizes["N"], generator=generator, dtype=dtype)}
@registry.operator(name="doubling", reference="twice", cases=cases, draw=draw, outputs=("y",), differentiable=("x",),
    properties=("forward", "gradient"), ranges={"N": (1, 9)},
    tolerance=registry.Tolerance(k=4, c=4, reason="one rounding"))
def doubling(arithmetic, x):
    return arithmetic(x)
@registry.variant(operator="doubling", name="twice")
def twice(x):
    return 2 * x
@registry.variant(operator="doubling", name="added")
def added(x):
    return x + x
@registry.variant(operator="doubling", name="wrong")
def wrong(x):
    return x + x.abs()
"""
    )
    assert run("--plugin", path, "--variant", "added") == 0
    assert run("--plugin", path, "--variant", "twice") == 0
    assert run("--plugin", path, "--variant", "wrong") == 1


def test_a_vacuous_case_is_an_error(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "vacuous.py"
    path.write_text(
        """
import torch, registry
def cases():
    return (registry.Case(name="nothing", kind="small", sizes={"N": 5}),)
def draw(case, generator, dtype):
    return {"x": torch.zeros(case.sizes["N"], dtype=dtype)}
@registry.operator(name="doubling", reference="twice", cases=cases, draw=draw, outputs=("y",), differentiable=("x",),
    properties=("forward",), tolerance=registry.Tolerance(k=4, c=4, reason="one rounding"))
def doubling(arithmetic, x):
    return arithmetic(x)
@registry.variant(operator="doubling", name="twice")
def twice(x):
    return 2 * x
"""
    )
    assert run("--plugin", path) == 2
    assert "zeros pass for the outputs of case nothing" in capsys.readouterr().err


def test_the_ledger_gets_only_what_is_built_in(plugin, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ledger = tmp_path / "ledger"
    assert run("--plugin", plugin(RIGHT), "--dtype", "float32", "--property", "identity", "--ledger", ledger) == 0
    assert not ledger.exists()
    chosen = ("--operator", "data_fetch", "--variant", "upcast", "--dtype", "float32", "--ledger", ledger)
    assert run(*chosen) == 0
    first = (ledger / "data_fetch.jsonl").read_text()
    assert run(*chosen) == 0
    assert (ledger / "data_fetch.jsonl").read_text() == first


def test_explain_tells_what_is_not_shown(capsys) -> None:  # type: ignore[no-untyped-def]
    assert command.main(["--explain"]) == 0
    told = capsys.readouterr().out
    assert told.count("Not shown:") >= 11


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proofs", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for option in (
        "--operator",
        "--variant",
        "--recipe",
        "--dtype",
        "--device",
        "--plugin",
        "--json",
        "--all",
        "--jobs",
        "--ledger",
    ):
        assert option in done.stdout


def test_a_long_chain_is_kept_and_plotted_and_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(carry, "LONG_CHUNKS", 90)
    monkeypatch.setattr(carry, "CHUNKS", 4)
    monkeypatch.setattr(carry, "_splits", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    chosen = ("--operator", "attention", "--variant", "chunked", "--property", "carry", "--dtype", "float32")
    assert run("--long", *chosen, "--ledger", tmp_path / "ledger") == 0
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["long.json"]
    # Default options alone run the long chain; the other two sets run the standard one.
    (kept,) = long.read(tmp_path / "ledger")
    points = kept.details["drift"]
    assert (points[0]["chunk"], points[-1]["chunk"]) == (1, 90)
    assert all(0 < point["S"] < 1e-5 for point in points)
    assert "chunked S" in (tmp_path / "drift" / "drift_attention_float32.svg").read_text()
    assert f"drift against float64: {tmp_path}/drift/drift_attention_float32.svg" in capfd.readouterr().out
