"""Fingerprints: an edit of what a variant reaches makes it stale, an edit of anything else does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import registry
from registry.ledger import Ledger, differences
from registry.records import Proof
from registry.source import Sources, canonical
from registry.static import StaticCatalogue, enumerate_static

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "fractus/operators/attention.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources that fingerprints are made of."""
    for name in ("registry", "fractus", "proofs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "ledger"))
    return tmp_path


def fingerprints(root: Path) -> dict[str, dict[str, object]]:
    catalogue = enumerate_static(Sources(root))
    return {key: catalogue.fingerprint(variant, "forward") for key, variant in catalogue.variants.items()}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, f"{old!r} is not in {path.name}"
    path.write_text(text.replace(old, new, 1))


def changed(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> dict[str, list[str]]:
    found = {key: differences(before[key], after[key]) for key in before}
    return {key: words for key, words in found.items() if words}


def test_an_arithmetic_operator_makes_its_variant_stale_and_no_neighbour(checkout: Path) -> None:
    before = fingerprints(checkout)
    edit(checkout / ATTENTION, "scores @ v_b + q_b @ S", "scores @ v_b - q_b @ S")
    words = changed(before, fingerprints(checkout))
    assert words == {"attention/chunked": ["fractus.operators.attention:chunked changed"]}


def test_comments_docstrings_and_layout_change_nothing(checkout: Path) -> None:
    before = fingerprints(checkout)
    path = checkout / ATTENTION
    edit(
        path,
        "    C = q.shape[1]\n    if C % block:",
        "    C = (\n        q.shape[1]\n    )  # the length\n    if C % block:",
    )
    edit(path, '"""Masked scores inside a block', '"""Other words: masked scores inside a block')
    path.write_text("# a comment\n\n" + path.read_text())
    assert changed(before, fingerprints(checkout)) == {}


def test_a_helper_makes_those_that_call_it_stale(checkout: Path) -> None:
    before = fingerprints(checkout)
    edit(
        checkout / ATTENTION,
        "z = z_0.unsqueeze(1) + k.cumsum(1)\n    numerator = (q",
        "z = z_0.unsqueeze(1) - k.cumsum(1)\n    numerator = (q",
    )
    words = changed(before, fingerprints(checkout))
    assert set(words) == {"attention/cumsum", "attention/chunked"}
    assert words["attention/chunked"] == ["fractus.operators.attention:cumsum changed"]


def test_a_tolerance_makes_every_variant_of_its_operator_stale_and_no_other(checkout: Path) -> None:
    before = fingerprints(checkout)
    edit(checkout / "fractus/tolerances.py", "k=8.0", "k=9.0")
    words = changed(before, fingerprints(checkout))
    assert {key.partition("/")[0] for key in words} == {"attention"}
    assert len(words) == 4
    assert all(reason == ["the operator's tolerance changed"] for reason in words.values())


def test_a_case_the_reference_and_the_property_count(checkout: Path) -> None:
    before = fingerprints(checkout)
    edit(checkout / "fractus/operators/attention_cases.py", '"C": 77', '"C": 78')
    assert changed(before, fingerprints(checkout))["attention/looped"] == ["the operator's contract or cases changed"]
    before = fingerprints(checkout)
    edit(checkout / ATTENTION, "torch.ones(C, C", "torch.ones(C + 0, C")
    assert "the operator's reference changed" in changed(before, fingerprints(checkout))["attention/looped"]
    before = fingerprints(checkout)
    edit(checkout / "proofs/budget.py", "error / budget", "error / (2 * budget)")
    assert changed(before, fingerprints(checkout))["moe/gather"] == ["the property that judged it changed"]


def test_options_and_decorators_count(checkout: Path) -> None:
    before = fingerprints(checkout)
    edit(checkout / ATTENTION, "Option(default=64", "Option(default=32")
    assert list(changed(before, fingerprints(checkout))) == ["attention/chunked"]


def test_torch_counts() -> None:
    catalogue = enumerate_static()
    current = catalogue.fingerprint(catalogue.variants["attention/chunked"], "forward")
    assert differences({**current, "torch": "2.11.0"}, current) == [f"torch 2.11.0 became {current['torch']}"]


def test_a_name_bound_again_at_module_level_counts(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "FACTOR = {'a': 1}\ndef helper(x):\n    return x * FACTOR['a']\n"
        "def f(x, helper=helper):\n    return helper(x)\n"
    )
    before = Sources(tmp_path).closure("module", "f")
    path.write_text(path.read_text() + "FACTOR['a'] = 2\n")
    after = Sources(tmp_path).closure("module", "f")
    assert {name for name in before if before[name] != after[name]} == {"module:FACTOR"}


def test_a_local_name_that_a_neighbour_has_too_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def neighbour(x):\n    return x + 1\ndef f(neighbour):\n    return neighbour * 2\n")
    assert set(Sources(tmp_path).closure("module", "f")) == {"module:f"}


def test_the_dump_knows_no_positions() -> None:
    import ast

    assert canonical(ast.parse("x = 1+2")) == canonical(ast.parse("\n\nx  =  (1 +\n 2)"))
    assert canonical(ast.parse("x = 1+2")) != canonical(ast.parse("x = 1-2"))
    assert canonical(ast.parse("x = 1")) != canonical(ast.parse("x = 1.0"))


def test_static_enumeration_is_what_load_finds() -> None:
    static, catalogue = enumerate_static(), registry.load()
    assert set(static.variants) == set(catalogue.variants)
    for key, variant in catalogue.variants.items():
        found = static.variants[key]
        assert found.option_sets() == variant.option_sets()
        assert (found.devices, found.dtypes, found.grad) == (variant.devices, variant.dtypes, variant.grad)
        assert found.claims_memory == (variant.memory_bound is not None)
        assert found.summary == variant.summary
    for name, operator in catalogue.operators.items():
        assert static.operators[name].properties == operator.properties
        assert static.operators[name].reference == operator.reference


def passed(catalogue: StaticCatalogue, key: str, property_name: str, options: dict[str, int]) -> Proof:
    variant = catalogue.variants[key]
    return Proof(
        operator=variant.operator, variant=variant.name, options=options, property=property_name, dtype="float32",
        device_class="cpu", status="passed", cases=1, checks=1, worst_error=0.0, budget_used=0.5,
        fingerprint=catalogue.fingerprint(variant, property_name),
    )  # fmt: skip


def test_a_variant_is_proven_when_every_property_is_at_every_option_set(tmp_path: Path) -> None:
    catalogue = enumerate_static()
    variant = catalogue.variants["attention/chunked"]
    needed = [
        passed(catalogue, variant.key, name, options)
        for options in variant.option_sets()
        for name in catalogue.required(variant, "float32")
    ]
    Ledger(tmp_path).write(needed[:-1])
    gaps = Ledger(tmp_path).gaps(variant, "cpu", "float32", catalogue)
    assert [(g.property, g.state) for g in gaps] == [(needed[-1].property, "missing")]
    Ledger(tmp_path).write(needed[-1:])
    assert Ledger(tmp_path).is_proven(variant, "cpu", "float32", catalogue)
    assert not Ledger(tmp_path).is_proven(variant, "cpu", "float64", catalogue)
    assert not Ledger(tmp_path).is_proven(variant, "cuda:sm_90", "float32", catalogue)
    lines = (tmp_path / "attention.jsonl").read_text().splitlines()
    assert len(lines) == len(needed)
    assert lines == sorted(lines, key=lambda line: Proof.from_json(__import__("json").loads(line)).key)


def test_only_a_passed_with_numbers_proves() -> None:
    common = {"operator": "o", "variant": "v", "property": "forward", "dtype": "float32", "device_class": "cpu"}
    with pytest.raises(ValueError, match="passed needs a worst error"):
        Proof(**common, status="passed")
    with pytest.raises(ValueError, match="not within 0"):
        Proof(**common, status="passed", cases=1, checks=1, worst_error=0.0, budget_used=1.5)
    with pytest.raises(ValueError, match="needs a message"):
        Proof(**common, status="skipped")
    with pytest.raises(ValueError, match="status is one of"):
        Proof(**common, status="fine")
