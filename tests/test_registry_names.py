"""Names, declarations and recipes: what is wrong is refused in one line that names it and the near one."""

from __future__ import annotations

from pathlib import Path

import pytest

import registry
from registry.__main__ import main
from registry.catalogue import check_signature
from registry.resolve import resolve
from registry.tree import Bundle, leaves, map_leaves


def test_an_unknown_variant_names_the_near_one() -> None:
    catalogue = registry.load()
    with pytest.raises(registry.UnknownNameError, match="did you mean 'chunked'"):
        catalogue.variant("attention/chunkd")
    with pytest.raises(registry.UnknownNameError, match="did you mean 'attention'"):
        catalogue.operator("attentoin")
    with pytest.raises(registry.UnknownNameError, match="did you mean 'production'"):
        registry.load_recipe("prodution")
    with pytest.raises(registry.UnknownNameError, match="did you mean 'row_batched'"):
        registry.load_recipe("production,moe=row_batchd")


def test_recipes_override_and_stay_in_range() -> None:
    recipe = registry.load_recipe("attention=chunked:block=32,moe=dense")
    assert recipe.variants["attention"] == "chunked"
    assert recipe.variants["cross_entropy"] == "dense"
    assert recipe.options["attention"] == {"block": 32}
    with pytest.raises(ValueError, match=r"block=8 lies outside the proven range 16\.\.128"):
        registry.load_recipe("attention=chunked:block=8")
    with pytest.raises(ValueError, match="option of attention/chunked 'blok'; did you mean 'block'"):
        registry.load_recipe("attention=chunked:blok=32")


def test_an_empty_ledger_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(registry.UnprovenVariantError) as refusal:
        resolve("production", "cpu", "float32", ledger=registry.Ledger(tmp_path))
    message = str(refusal.value)
    assert "attention/chunked is not proven on cpu float32: forward" in message
    assert (
        f"python -m proofs --operator attention --variant chunked --device cpu --dtype float32 --ledger {tmp_path}"
        in message
    )


def test_a_plugin_with_another_signature_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import registry\n@registry.variant(operator='attention', name='mine')\ndef mine(q, k, v):\n    return q\n"
    )
    with pytest.raises(ValueError, match=r"attention/mine takes \(q, k, v\); attention is \(q, k, v, carry\)"):
        registry.load(plugins=[path])


def test_duplicates_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import registry\n@registry.variant(operator='attention', name='chunked')\n"
        "def mine(q, k, v, carry):\n    return q\n"
    )
    with pytest.raises(ValueError, match="attention/chunked is declared twice"):
        registry.load(plugins=[path])


def test_a_condition_must_be_the_operators() -> None:
    catalogue = registry.load()
    variant = registry.Variant(
        operator="moe",
        name="x",
        function=lambda hidden, phases, experts, top_k, concentration: 0,
        conditions=("row_constant",),
    )
    with pytest.raises(registry.UnknownNameError, match="row_constant_routing"):
        check_signature(catalogue.operators, variant)


def test_bundles_read_by_key_and_attribute_and_stay_as_they_are() -> None:
    bundle = Bundle({"attn.w_qkv": 1, "attn.b": 2, "n_heads": 3})
    assert bundle.attn.w_qkv == bundle["attn.w_qkv"] == 1
    assert bundle.n_heads == 3
    assert list(leaves({"p": bundle, "c": (4, 5)})) == [
        ("p.attn.w_qkv", 1),
        ("p.attn.b", 2),
        ("p.n_heads", 3),
        ("c.0", 4),
        ("c.1", 5),
    ]
    assert map_leaves(lambda name, leaf: leaf * 2, bundle)["n_heads"] == 6
    with pytest.raises(AttributeError, match="immutable"):
        bundle.n_heads = 4
    with pytest.raises(AttributeError, match="no entry 'nope'"):
        _ = bundle.nope


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["list", "--ledger", str(tmp_path)]) == 0
    assert "attention/chunked" in capsys.readouterr().out
    assert main(["show", "attention/chunked"]) == 0
    assert "block=64, proven from 16 to 128" in capsys.readouterr().out
    assert main(["why", "attention/chunked", "--ledger", str(tmp_path)]) == 1
    assert "forward (float32 at block=64) is missing: never proven on cpu" in capsys.readouterr().out
    assert main(["why", "attention/chunkd"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["why", "attention/chunked", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_imports_point_one_way() -> None:
    """registry <- fractus <- proofs, benchmarks, trainer; reports and registry never import torch at their top."""
    import ast

    root = Path(__file__).resolve().parent.parent
    allowed = {
        "registry": {"registry"},
        "fractus": {"registry", "fractus"},
        "proofs": {"registry", "fractus", "proofs"},
        "benchmarks": {"registry", "fractus", "benchmarks", "trainer"},
        "trainer": {"registry", "fractus", "trainer"},
        "reports": {"registry", "reports"},
    }
    for package, may in allowed.items():
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                for name in names:
                    top = name.partition(".")[0]
                    assert top not in allowed or top in may, f"{path.relative_to(root)} imports {name}"
                    assert not (package == "reports" and top in ("torch", "fractus", "proofs")), (
                        f"{path.relative_to(root)} imports {name}"
                    )
