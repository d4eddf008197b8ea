"""Parts of the measuring harness: limits, clocks, inputs that come once, rotated rounds, floors and bad usage."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import registry
from benchmarks import floors, inputs, rounds, runner, timing
from benchmarks.__main__ import main
from benchmarks.check import disagreement
from benchmarks.fetch import FetchWork, island_starts, make_shard
from benchmarks.kept import Kept
from benchmarks.profiles import FULL, QUICK, STANDARD
from benchmarks.spec import Cell, Outcome, Table
from benchmarks.suites import SUITES, Plan, stack
from benchmarks.work import OperatorWork, as_case

ATTENTION = Cell(
    suite="attention",
    kind="operator",
    operator="attention",
    variant="einsum",
    case="real_1b",
    axes={"B": 1, "G": 2, "C": 8, "K": 4},
    mode="forward_backward",
)


NOTING = '''
import time

from registry import Case, Tolerance, operator, variant


def cases():
    return (Case(name="only", kind="real", sizes={"N": 4}),)


def draw(case, generator, dtype):
    import torch

    return {"x": torch.randn(4, generator=generator, dtype=dtype)}


@operator(
    name="noting", reference="first", cases=cases, draw=draw, outputs=("y",), properties=("forward",),
    tolerance=Tolerance(k=8.0, c=32.0, reason="one rounding"),
)
def noting(arithmetic, x):
    """Itself."""
    return arithmetic(x)


def note(name, x):
    with open("{log}", "a") as file:
        print("begin", name, file=file, flush=True)
        time.sleep(0.02)
        print("end", name, file=file, flush=True)
    return x.clone()


@variant(operator="noting", name="first")
def first(x):
    return note("first", x)


@variant(operator="noting", name="second")
def second(x):
    return note("second", x)
'''


@pytest.fixture(scope="module")
def catalogue() -> registry.Catalogue:
    return registry.load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "atention"], "did you mean 'attention'?"),
        (["--memory-limit", "much"], "'much' is not a number of bytes"),
        (["--recipe", "productoin"], "did you mean 'production'?"),
        (["--plugin", "nowhere.py"], "no plug-in file nowhere.py"),
        (["--rounds", "0"], "at least 1"),
        (["--suite", "attention", "--axes", "B=3"], "standard profile has no such cells"),
        (["--device", "tpu"], "is not cpu or cuda"),
    ],
)
def test_bad_usage_is_one_line_and_writes_nothing(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records"
    assert main([*options, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "--out", str(tmp_path / "records")]) == 2
    assert "no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_an_outcome_checks_itself() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Outcome(status="crashed")
    with pytest.raises(ValueError, match="measured has times"):
        Outcome(status="measured")


def test_a_process_past_its_time_is_ended() -> None:
    cell = replace(ATTENTION, budget_s=60.0, turns=100_000, limit_s=1.5)
    outcome, answers = runner.alone(cell, 1 << 40)
    assert (outcome.status, answers) == ("timed_out", [])
    assert "1.5 s" in outcome.reason


def test_known_need_above_the_limit_is_refused_without_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Process, "start", lambda self: pytest.fail("started"))
    outcome, _ = runner.alone(replace(ATTENTION, need_bytes=2**40), 2**30)
    assert outcome.status == "refused"
    assert outcome.reason.startswith("memory: 1024.00 GiB needed")


def test_no_input_comes_twice(catalogue: registry.Catalogue) -> None:
    work = OperatorWork(catalogue, ATTENTION)
    seen = {tuple(work.item(index)[0][0].reshape(-1).tolist()) for index in range(40)}
    cotangents = {tuple(work.item(index)[2][0].reshape(-1).tolist()) for index in range(10)}  # type: ignore[union-attr]
    assert (len(seen), len(cotangents)) == (40, 10)


def test_large_leaves_take_turns(catalogue: registry.Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LARGE_BYTES", 16)
    work = OperatorWork(catalogue, ATTENTION)
    q = [work.item(index)[0][0] for index in range(3)]
    assert torch.equal(q[0], q[2])
    assert not torch.equal(q[0], q[1])


class Counting:
    """Work that notes every item, each as slow as it is told."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.items = seconds, list[int]()

    def item(self, index: int) -> int:
        return index

    def item_bytes(self) -> int:
        return 1

    def call(self, item: int) -> None:
        import time

        self.items.append(item)
        time.sleep(self.seconds[min(len(self.items) - 1, len(self.seconds) - 1)])


def test_timing_walks_fresh_items_and_keeps_raw_values() -> None:
    work = Counting([0.002])
    timed = timing.measure(work, budget_s=0.03, device="cpu", turns=5)
    assert len(set(work.items)) == len(work.items)
    assert len(timed.values_s) == 5
    assert all(value >= 0.002 for value in timed.values_s)
    assert not timed.slow_start


@pytest.mark.parametrize(("early_s", "late_s", "seen"), [(0.03, 0.001, True), (0.02, 0.0, True), (0.0003, 0.0, False)])
def test_a_slow_start_is_seen_and_a_cold_call_of_microseconds_is_none(
    early_s: float, late_s: float, seen: bool
) -> None:
    work = Counting([early_s] * 6 + [late_s])
    assert timing.measure(work, budget_s=0.05, device="cpu", turns=4).slow_start is seen


Results = list[tuple[Outcome, list[dict[str, torch.Tensor]]]]


def stub(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[list[float]]]) -> list[tuple[str, bool, Any]]:
    """Replace processes by given turns a round; returns what was asked to run, in order."""
    asked: list[tuple[str, bool, Any]] = []
    turn: dict[tuple[str, bool], int] = {}

    def run(cells: list[Cell], limit: int, seeds: Any = (), progress: Any = None) -> Results:
        results: Results = []
        for cell in cells:
            key = (cell.variant, cell.null)
            asked.append((*key, seeds))
            values = tuple(seconds["null" if cell.null else cell.variant][turn.get(key, 0)])
            turn[key] = turn.get(key, 0) + 1
            outcome = Outcome(status="measured", values_s=values, median_s=statistics.median(values))
            results.append((outcome, [{"y": torch.zeros(1)} for _ in seeds]))
        return results

    monkeypatch.setattr(runner, "run", run)
    return asked


def three(variants: tuple[str, ...]) -> Table:
    cells = [replace(ATTENTION, variant=name) for name in variants]
    return Table((cells[0], replace(cells[0], null=True), *cells[1:]), 3)


def runs(catalogue: registry.Catalogue) -> rounds.Runner:
    return rounds.Runner(catalogue, 1 << 40, lambda cell: "", lambda cell: None)


def test_rounds_rotate_and_ratios_are_taken_within_them(
    catalogue: registry.Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that slows down by 10 and 100 changes no ratio, which one over all rounds would.
    times = [[1.0], [10.0], [100.0]]
    asked = stub(monkeypatch, {"einsum": times, "null": times, "chunked": [[0.5], [5.0], [25.0]]})
    records = runs(catalogue).run(three(("einsum", "chunked")))
    assert [a[:2] for a in asked[:3]] == [("einsum", False), ("einsum", True), ("chunked", False)]
    assert [a[:2] for a in asked[3:6]] == [("einsum", True), ("chunked", False), ("einsum", False)]
    assert [r["ratio"] for r in records] == [None, 1.0, 2.0]
    assert records[2]["ratios"] == [2.0, 2.0, 4.0]


def test_an_interrupted_suite_keeps_its_finished_tables(tmp_path: Path) -> None:
    table = three(("einsum", "chunked"))
    path, records = tmp_path / ".attention.part", [{"ratio": 2.0}]
    Kept(path, {"commit": "a"}, None).put(table, records)
    with path.open("a") as file:
        file.write('{"table": "cut of')
    assert Kept(path, {"commit": "a"}, None, use=True).get(table) == records
    assert Kept(path, {"commit": "b"}, None, use=True).get(table) is None
    assert Kept(path, {"commit": "a"}, "2GiB", use=True).get(table) is None
    assert Kept(path, {"commit": "a"}, None, use=True).get(replace(table, rounds=2)) is None
    assert Kept(path, {"commit": "a"}, None).get(table) is None
    assert not path.exists()


def test_a_reference_that_did_not_fit_answers_under_the_seed_of_the_round(
    catalogue: registry.Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(cells: list[Cell], limit: int, seeds: Any = (), progress: Any = None) -> Results:
        results: Results = []
        for cell in cells:
            big = cell.variant == "einsum" and not cell.check_only
            fits = Outcome(status="measured", values_s=(1.0,), median_s=1.0)
            killed = Outcome(status="killed_memory", reason="too much")
            answer = {"y": torch.full((1,), float(cell.seed))}
            results.append((killed, []) if big else (fits, [answer for _ in seeds]))
        return results

    monkeypatch.setattr(runner, "run", run)
    einsum, null, chunked = runs(catalogue).run(three(("einsum", "chunked")))
    assert [einsum["status"], null["status"]] == ["killed_memory"] * 2
    assert (chunked["status"], chunked["checked"], chunked["ratio"]) == ("measured", True, None)


def test_a_wrong_output_is_a_better_reason_than_a_slow_start(
    catalogue: registry.Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(cells: list[Cell], limit: int, seeds: Any = (), progress: Any = None) -> Results:
        results: Results = []
        for cell in cells:
            good = cell.variant == "einsum"
            answer = {"y": torch.full((1,), float(cell.variant == "chunked"))}
            outcome = Outcome(status="measured", values_s=(1.0,), median_s=1.0) if good else slow
            results.append((outcome, [answer for _ in seeds]))
        return results

    slow = Outcome(status="refused", reason="slow start: 1 s a call")
    monkeypatch.setattr(runner, "run", run)
    _, _, wrong, right = runs(catalogue).run(three(("einsum", "chunked", "fused")))
    assert wrong["reason"].startswith("wrong output after timing: y is off by 1")
    assert right["reason"].startswith("slow start")


def test_a_ratio_is_taken_between_turns_that_lay_side_by_side(
    catalogue: registry.Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The machine is ten times slower in the last turns: medians would say 1 / 5 for a row twice as fast.
    times = {"einsum": [[1.0, 1.0, 10.0]] * 3, "null": [[1.0, 1.0, 10.0]] * 3, "chunked": [[0.5, 5.0, 5.0]] * 3}
    stub(monkeypatch, times)
    assert runs(catalogue).run(three(("einsum", "chunked")))[2]["ratios"] == [2.0] * 3


def test_processes_take_turns_and_one_alone_computes(tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(NOTING.replace("{log}", str(tmp_path / "log")))
    cell = Cell(
        suite="noting", kind="operator", operator="noting", variant="first", case="only", axes={"N": 4},
        mode="forward", threads=1, turns=4, pinned=True, plugins=(str(tmp_path / "noting.py"),),
    )  # fmt: skip
    results = runner.run([cell, replace(cell, variant="second")], 1 << 40, (1,))
    assert [outcome.status for outcome, _ in results] == ["measured"] * 2
    assert all(len(outcome.values_s) == 4 and not outcome.alone for outcome, _ in results)
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(lines[i].split() == ["begin", lines[i + 1].split()[1]] for i in range(0, len(lines), 2))
    # Calibration of each, turns, whoever was first in one being second in the next, then peaks and checks of each.
    order = "".join(line.split()[1][0] for line in lines[::2])
    calls, peaks = 1 + timing.TRIALS, 3 + 1
    assert order == "f" * calls + "s" * calls + "fssffssf" + "f" * peaks + "s" * peaks


def test_what_memory_killed_beside_others_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "default_limit_bytes", lambda: 2**20)
    cells = [ATTENTION, replace(ATTENTION, variant="chunked")]
    results = runner.run([replace(cell, turns=2, budget_s=0.01) for cell in cells], 1 << 40)
    # A busy machine may make one of microseconds a slow start; the table's rounds would try it again.
    assert all(outcome.alone and outcome.status != "killed_memory" for outcome, _ in results)


def test_checks_use_seeds_that_differ_between_rounds(
    catalogue: registry.Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stub(monkeypatch, {"einsum": [[1.0]] * 3, "null": [[1.0]] * 3})
    runs(catalogue).run(three(("einsum",)))
    first, last = asked[0][2], asked[-1][2]
    assert len(first) == len(last) == 1
    assert first != last


def sampler_cell() -> Cell:
    axes = {"N": 400, "D": 4, "V": 6}
    return replace(ATTENTION, suite="sampler", operator="sampler", variant="dense", axes=axes, mode="forward")


def test_a_sampler_is_checked_by_its_law(catalogue: registry.Catalogue) -> None:
    cell = sampler_cell()
    answer = OperatorWork(catalogue, cell).check(5)
    assert not disagreement(catalogue, cell, 5, answer, answer)
    arguments = inputs.drawn(catalogue.operator("sampler"), as_case(cell), 5, "float32", "cpu")
    greedy = {"tokens": (arguments["hidden"] @ arguments["weight"].T).argmax(-1)}
    assert "standard deviations" in disagreement(catalogue, cell, 5, answer, greedy)


@pytest.mark.parametrize("operator", ["attention", "cross_entropy", "moe", "block", "optimizer_step"])
def test_every_variant_agrees_after_timing_and_a_wrong_gradient_does_not(
    operator: str, catalogue: registry.Catalogue
) -> None:
    sizes = next(case for case in catalogue.operator(operator).cases() if case.name == "small")
    mode = "step" if operator == "optimizer_step" else "forward_backward"
    cell = replace(ATTENTION, suite=operator, operator=operator, axes=sizes.sizes, values=sizes.values, mode=mode)
    cell = replace(cell, recipe="production" if operator == "block" else None)
    answers = {v.name: OperatorWork(catalogue, replace(cell, variant=v.name)).check(3) for v in catalogue.of(operator)}
    expected = answers[catalogue.operator(operator).reference]
    for name, actual in answers.items():
        assert not disagreement(catalogue, cell, 3, expected, actual), name
    last = list(expected)[-1]
    wrong = {**expected, last: expected[last] * 1.01}
    assert last in disagreement(catalogue, cell, 3, expected, wrong)


def test_fetching_reads_the_islands_of_a_sparse_shard(tmp_path: Path, catalogue: registry.Catalogue) -> None:
    tokens = 20_000_000
    make_shard(tmp_path / "shard.npy", tokens)
    assert (tmp_path / "shard.npy").stat().st_blocks * 512 < 2 * 4 * 65536 * len(island_starts(tokens))
    axes = {"P": 2, "B": 2, "T": 16, "L": tokens}
    cell = replace(
        ATTENTION, suite="data_fetch", kind="fetch", operator="data_fetch", variant="memmap", axes=axes, mode="forward",
        extras={"shard": str(tmp_path / "shard.npy")},
    )  # fmt: skip
    work = FetchWork(catalogue, cell)
    work.call(work.item(0))
    held_bytes = work.resident_bytes()
    answer = work.check(1)
    work.close()
    assert int((answer["inputs"] > 0).sum()) > 100
    assert torch.equal(answer["inputs"][:, :, 1:], answer["targets"][:, :, :-1])
    assert held_bytes < 8 * tokens


@pytest.mark.parametrize("operator", sorted(floors.LEAST))
def test_floors_grow_with_the_size_and_with_backward(operator: str, catalogue: registry.Catalogue) -> None:
    rates = {"matmul_float32_operations_per_s": 1e9, "copy_bytes_per_s": 1e9}
    sizes = dict(next(case for case in catalogue.operator(operator).cases() if case.kind == "real").sizes)
    first = next(iter(sizes))
    small = floors.floor_s(operator, sizes, "forward", "float32", rates)
    large = floors.floor_s(operator, {**sizes, first: 2 * sizes[first]}, "forward", "float32", rates)
    both = floors.floor_s(operator, sizes, "forward_backward", "float32", rates)
    assert small is not None
    assert large is not None
    assert both is not None
    assert 0 < small < large
    assert both >= 3 * small * 0.999


@pytest.mark.parametrize("profile", [QUICK, STANDARD, FULL], ids=lambda profile: str(profile.name))
def test_every_suite_has_cells_of_every_variant(profile: Any, catalogue: registry.Catalogue) -> None:
    plan = Plan(catalogue=catalogue, profile=profile)
    for name, suite in SUITES.items():
        tables = suite(plan)
        if name in catalogue.operators:
            for table in tables:
                assert {cell.variant for cell in table.cells} == {v.name for v in catalogue.of(name)}
                assert table.cells[1].null
        assert tables or (name, profile.name) == ("engine_1b", "quick")


def test_the_stack_ends_at_the_recipe_and_adds_one_a_row() -> None:
    specs = stack("production")
    assert specs[0] == "reference"
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(specs))
    last, wanted = registry.load_recipe(specs[-1]), registry.load_recipe("production")
    left_out = {"data_fetch", "sampler"}
    assert {k: v for k, v in last.variants.items() if k not in left_out} == {
        k: v for k, v in wanted.variants.items() if k not in left_out
    }


def test_the_list_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--suite", "engine*", "--out", str(tmp_path / "records")]) == 0
    printed = capsys.readouterr().out
    assert "engine: engine/production step B=8" in printed
    assert "(null)" in printed
    assert main(["--list", "--suite", "attention", "--axes", "B=8", "--out", str(tmp_path / "records")]) == 0
    printed = capsys.readouterr().out
    assert "B=8" in printed
    assert "B=2" not in printed
    assert not (tmp_path / "records").exists()


def test_the_trainer_is_measured_by_its_own_metrics(tmp_path: Path) -> None:
    catalogue, recipe = registry.enumerate_static(), registry.load_recipe("production")
    proofs = [
        registry.Proof(
            operator=operator, variant=name, property=each, options=options, dtype="float32", device_class="cpu",
            status="passed", cases=1, checks=1, worst_error=0.0, budget_used=0.0,
            fingerprint=catalogue.fingerprint(catalogue.variants[f"{operator}/{name}"], each),
        )
        for operator, name in recipe.variants.items()
        for each in catalogue.required(catalogue.variants[f"{operator}/{name}"], "float32")
        for options in catalogue.variants[f"{operator}/{name}"].option_sets()
    ]  # fmt: skip
    registry.Ledger(tmp_path).write(proofs)
    cell = replace(
        ATTENTION, suite="trainer", kind="trainer", operator="trainer", variant="production", recipe="production",
        mode="step", axes={"B": 2, "C": 32}, extras={"sizes": QUICK.engine, "steps": 5}, ledger=str(tmp_path),
    )  # fmt: skip
    outcome, _ = runner.alone(cell, 1 << 40)
    assert (outcome.status, outcome.reason) == ("measured", "")
    assert len(outcome.values_s) == 3
    assert outcome.peak_bytes is not None
    refused, _ = runner.alone(replace(cell, ledger=str(tmp_path / "empty")), 1 << 40)
    assert "is not proven" in refused.reason


def test_engines_are_measured_and_checked(tmp_path: Path) -> None:
    options = ["--suite", "engine", "--quick", "--rounds", "1", "--unproven", "--threads", "1"]
    assert main([*options, "--out", str(tmp_path), "--json", str(tmp_path / "all" / "all.json")]) == 0
    records = json.loads((tmp_path / "all" / "all.json").read_text())["records"]
    assert [r["variant"] for r in records] == ["reference", "reference", "production"]
    assert all(r["status"] == "measured" and r["checked"] for r in records)
    assert all(len(r["values_s"]) == QUICK.engine_steps for r in records)
