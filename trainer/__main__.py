"""The command line: ``python -m trainer run | data tokenize, verify, inspect | quickstart``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer import corpus
from trainer.configuration import RunConfiguration, configure
from trainer.errors import TrainingError, UsageError

# Only in the environment: the names that launch scripts set; a recipe says the same on the command line.
ENVIRONMENT_ONLY = ("gpu_id", "attn_impl", "block_ckpt", "compile_blocks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: 0 good, 1 a run that had to stop or data that differs, 2 bad usage, 128 + N: signal N."""
    given = parser().parse_args(arguments)
    try:
        return int(given.command(given))
    except UsageError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    root = argparse.ArgumentParser(
        prog="python -m trainer", description="Train Fractus on token shards with proven variants."
    )
    verbs = root.add_subparsers(required=True, metavar="run | data | quickstart")
    run = verbs.add_parser("run", help="train on a shard; the same command again goes on where it stopped")
    for name, field in RunConfiguration.model_fields.items():
        if name not in ENVIRONMENT_ONLY:
            alias = f"; environment: {field.validation_alias}" if field.validation_alias else ""
            default = "" if field.default is None or field.is_required() else f" (default: {field.default})"
            run.add_argument(
                f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=f"{field.description}{default}{alias}"
            )
    run.set_defaults(command=_run)
    _add_data(verbs.add_parser("data", help="make, check and look into shards"))
    quickstart = verbs.add_parser("quickstart", help="tokenize, prove, train a small engine and say what was done")
    quickstart.add_argument(
        "--out", type=Path, default=Path("quickstart"), help="folder for all of it (default: quickstart)"
    )
    quickstart.set_defaults(command=_quickstart)
    return root


def _add_data(data: argparse.ArgumentParser) -> None:
    verbs = data.add_subparsers(required=True, metavar="tokenize | verify | inspect")
    tokenize = verbs.add_parser("tokenize", help="text files and folders of them to int32 shards and a manifest")
    tokenize.add_argument(
        "sources", type=Path, nargs="+", help="text files, or folders read recursively in sorted order"
    )
    tokenize.add_argument("-o", "--out", type=Path, required=True, help="folder for the shards and manifest.json")
    tokenize.add_argument("--shards", type=int, default=1, help="number of shards (default: 1)")
    tokenize.set_defaults(command=_tokenize)
    verify = verbs.add_parser("verify", help="hold shards against their manifest; exit 1 when they differ")
    verify.add_argument("folder", type=Path)
    verify.set_defaults(command=_verify)
    inspect = verbs.add_parser("inspect", help="print the text around a token")
    inspect.add_argument("shard", type=Path)
    inspect.add_argument("--at", type=int, default=0, help="token (default: 0)")
    inspect.add_argument("--tokens", type=int, default=64, help="how many from there on (default: 64)")
    inspect.set_defaults(command=_inspect)


def _share_cores() -> None:
    """Before torch loads: waiting threads sleep; spinning, two processes on the same cores are ten times slower."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run(given: argparse.Namespace) -> int:
    _share_cores()
    from trainer.loop import run

    return run(configure({name: value for name, value in vars(given).items() if name != "command"}))


def _tokenize(given: argparse.Namespace) -> int:
    manifest = corpus.tokenize(given.sources, given.out, given.shards)
    print(
        f"{manifest['documents']} documents, {manifest['total_tokens']} tokens in {given.shards} shards: "
        f"{given.out / corpus.MANIFEST}"
    )
    return 0


def _verify(given: argparse.Namespace) -> int:
    problems = corpus.verify(given.folder)
    print("\n".join(problems) if problems else f"{given.folder}: every shard is what its manifest says")
    return 1 if problems else 0


def _inspect(given: argparse.Namespace) -> int:
    print(corpus.inspect(given.shard, given.at, given.tokens))
    return 0


def _quickstart(given: argparse.Namespace) -> int:
    _share_cores()
    from trainer.quickstart import quickstart

    return quickstart(given.out)


if __name__ == "__main__":
    sys.exit(main())
