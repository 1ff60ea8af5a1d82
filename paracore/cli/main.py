"""The command `paracore`: parses arguments and hands over to one module per subcommand."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from paracore import __version__
from paracore.cli import bench, env, exit_codes, kernels, profile, train, validate
from paracore.errors import UsageError

# Each module has add_arguments(parser) and run(args) -> exit status; its docstring is the help.
_COMMANDS = {
    "validate": validate,
    "train": train,
    "bench": bench,
    "profile": profile,
    "kernels": kernels,
    "env": env,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="paracore", description="Exact, fast, parallel training of Transformers."
    )
    parser.add_argument("--version", action="version", version=f"paracore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        description = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="when something fails, show where")
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    args.argv = arguments
    try:
        status: int = args.run(args)
    except UsageError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("paracore: interrupted by SIGINT", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except Exception as error:  # noqa: BLE001 (one line for the user, the rest on request)
        print(f"paracore: error: {type(error).__name__}: {error}", file=sys.stderr)
        print(traceback.format_exc() if args.traceback else "(--traceback shows where)", file=sys.stderr)
        return exit_codes.CRASHED
    return status


def _refuse(error: UsageError) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"paracore: error: {error}", file=sys.stderr)
    else:
        # Every rank raises it alike, as a rule, and one message is enough: the launcher decides.
        get_error_handler().record_exception(error)
    return exit_codes.USAGE
