"""``python -m registry list | show O/V | why O/V``: what there is, and whether it is proven."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import os
import sys
from collections.abc import Sequence

from registry.catalogue import Catalogue, load, unknown
from registry.declare import DTYPES, Variant
from registry.ledger import Ledger
from registry.resolve import command, device_class
from registry.static import StaticCatalogue, StaticVariant, enumerate_static


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 good (``why``: proven), 1 not proven, 2 bad usage with one line."""
    arguments = _parser().parse_args(argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"registry: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output, head for one, had enough of it; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.verb == "list":
        where = device_class(arguments.device)
        return _list(enumerate_static(), arguments.pattern, Ledger(arguments.ledger), where, arguments.dtype)
    if arguments.verb == "show":
        return _show(load(), arguments.variant)
    return _why(enumerate_static(), arguments.variant, Ledger(arguments.ledger), arguments.device, arguments.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m registry", description="Operators, their variants, and whether they are proven."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="every operator and variant, with its state on a device and dtype")
    listing.add_argument("pattern", nargs="?", default="*", help="glob over operator/variant")
    showing = verbs.add_parser("show", help="what a variant declares, and its source")
    why = verbs.add_parser("why", help="proven or not, and what exactly is missing or changed (exit 0 proven, 1 not)")
    for verb in (showing, why):
        verb.add_argument("variant", metavar="O/V", help="operator/variant; why takes globs")
    for verb in (listing, why):
        verb.add_argument("--device", default="cpu")
        verb.add_argument("--dtype", default="float32", choices=DTYPES)
        verb.add_argument("--ledger", default=None, help="folder of proof records (default: the checkout's)")
    return parser


def _list(catalogue: StaticCatalogue, pattern: str, ledger: Ledger, where: str, dtype: str) -> int:
    shown = 0
    for operator in catalogue.operators.values():
        for variant in sorted(_of(catalogue, operator.name), key=lambda v: (v.name != operator.reference, v.name)):
            if fnmatch.fnmatchcase(variant.key, pattern) or fnmatch.fnmatchcase(operator.name, pattern):
                gaps = ledger.gaps(variant, where, dtype, catalogue)
                state = "proven" if not gaps else gaps[0].state
                role = "reference" if variant.name == operator.reference else ""
                print(f"{variant.key:34} {state:12} {role:10} {variant.summary}")
                shown += 1
    if not shown:
        raise unknown("variant", pattern, catalogue.variants)
    return 0


def _of(catalogue: StaticCatalogue, operator: str) -> list[StaticVariant]:
    return [v for v in catalogue.variants.values() if v.operator == operator]


def _show(catalogue: Catalogue, key: str) -> int:
    variant: Variant = catalogue.variant(key)
    operator = catalogue.operators[variant.operator]
    print(f"{variant.key}: {variant.summary}")
    print(f"  reference    {operator.name}/{operator.reference}")
    print(f"  signature    {operator.name}{inspect.signature(operator.contract)}")
    for name, option in variant.options.items():
        print(f"  option       {name}={option.default}, proven from {option.low} to {option.high}")
    print(f"  claims       devices {', '.join(variant.devices)}; dtypes {', '.join(variant.dtypes)}")
    if variant.conditions:
        print(f"  only where   {', '.join(variant.conditions)}")
    if variant.requires:
        print(f"  requires     {', '.join(variant.requires)}")
    print(f"  determinism  {variant.determinism}{'; single backward' if variant.single_backward else ''}")
    print(f"  tolerance    k={operator.tolerance.k}, c={operator.tolerance.c}: {operator.tolerance.reason}")
    print(f"  properties   {', '.join(operator.properties)}")
    print()
    print(inspect.getsource(variant.function))
    return 0


def _why(catalogue: StaticCatalogue, pattern: str, ledger: Ledger, device: str, dtype: str) -> int:
    where = device_class(device)
    chosen = [v for key, v in sorted(catalogue.variants.items()) if fnmatch.fnmatchcase(key, pattern)]
    if not chosen:
        raise unknown("variant", pattern, catalogue.variants)
    verdict = 0
    for variant in chosen:
        gaps = ledger.gaps(variant, where, dtype, catalogue)
        if not gaps:
            properties = ", ".join(catalogue.required(variant, dtype)) or "nothing applies"
            print(f"{variant.key} is proven on {where} {dtype}: {properties}")
            continue
        verdict = 1
        print(f"{variant.key} is not proven on {where} {dtype}:")
        for gap in gaps:
            print(f"  {gap}")
        print(f"  prove it with: {command(variant, device, dtype, ledger)}")
    return verdict


if __name__ == "__main__":
    sys.exit(main())
