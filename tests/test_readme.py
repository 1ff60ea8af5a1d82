"""What the README and the pages it links to say is so: tables, commands, variables, code, links, pictures."""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from paracore.bench import machine, plots
from paracore.cli import env, support
from paracore.cli.bench import _commands
from paracore.cli.main import _COMMANDS, build_parser
from paracore.errors import UsageError

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/figures.md", "bench/profiling.md")
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """Return the README's section of a title."""
    begin = README.index(f"\n## {title}\n")
    end = README.find("\n## ", begin + 1)
    return README[begin : None if end < 0 else end]


def first_cells(table: str) -> list[list[str]]:
    """Return the code in the first column of each row."""
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in rows]


# ---------------------------------------------------------------- tables


def test_the_table_of_operations_is_what_the_code_does() -> None:
    table = README.split("<!-- paracore env --matrix -->\n")[1].split("\n<!-- end -->")[0]
    assert table.splitlines() == list(support.markdown()), "paracore env --matrix prints it"


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["env", "--matrix"])
    assert args.run(args) == 0
    assert capsys.readouterr().out.splitlines() == list(support.markdown())


def test_every_command_is_listed_and_exists() -> None:
    listed = [command for row in first_cells(section("Commands")) for command in row]
    commands = {f"paracore {name}" for name in _COMMANDS if name != "bench"}
    commands |= {f"paracore bench {name}" for name in _commands()}
    assert {command for command in listed if command.startswith("paracore ")} == commands
    with_main = {
        f"python -m paracore.bench.{path.stem}"
        for path in (ROOT / "bench").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert {command for command in listed if command.startswith("python ")} == with_main
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    made = {command for command in listed if command.startswith("make ")}
    assert made == {f"make {target}" for target in targets[1].split()}


# ---------------------------------------------------------------- commands


def shell_commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in the blocks of shell code of a page."""
    text = (ROOT / page).read_text()
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def parse(words: list[str]) -> None:
    """Parse a command as it would be; raise SystemExit where it is not one."""
    if words[:1] == ["paracore"]:
        args = build_parser().parse_args(words[1:])
        if "--" in words:
            parse(words[words.index("--") + 1 :])
        assert callable(args.run)
    elif "-m" in words:
        name, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        if name == "paracore":
            parse(["paracore", *arguments])
        else:
            assert find_spec(name) is not None, name
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words[1]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = list(shell_commands(page))
    assert commands
    for words in commands:
        try:
            parse(words)
        except SystemExit:
            pytest.fail(f"{page}: {shlex.join(words)}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for command in set(re.findall(r"`paracore ([^`]+)`", text)):
        words = itertools.takewhile(str.isidentifier, command.split())
        with pytest.raises(SystemExit) as stopped:
            build_parser().parse_args([*words, "--help"])
        assert stopped.value.code == 0, command
        flags = set(re.findall(r"--\w[\w-]*", command))
        assert flags <= set(re.findall(r"--[\w-]+", capsys.readouterr().out)), command


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a parser and all of its subcommands."""
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(options, action.choices.values()))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_flags_in_the_text_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    flags = set(re.findall(r"`(--\w[\w-]*)", text))
    assert flags
    assert flags <= options(build_parser())


# ---------------------------------------------------------------- environment variables

# Where what is looked up is no literal: what it is.
TABLES = {
    "paracore/cli/env.py": set(env.ENVIRONMENT),
    "bench/machine.py": set(machine._VARIABLES),
    "paracore/cli/distributed.py": {"OMP_WAIT_POLICY", "GLOO_SOCKET_IFNAME"},
}


def sources(*suffixes: str) -> list[Path]:
    folders = [path for name in ("paracore", "kernels", "bench", "csrc") for path in (ROOT / name).rglob("*")]
    files = [*folders, ROOT / "setup.py", ROOT / "build_backend.py"]
    return [path for path in files if path.suffix in suffixes and path.is_file()]


def variables_read(path: Path) -> set[str]:
    """Return the environment variables that a file of Python looks up."""
    tree = ast.parse(path.read_text())
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "os.environ.get",
            "os.environ.pop",
            "os.environ.setdefault",
            "os.getenv",
        ):
            keys.append(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            keys.append(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            keys.append(node.left)
    found: set[str] = set()
    for key in keys:
        if isinstance(key, ast.Constant):
            found.add(str(key.value))
        elif isinstance(key, ast.Name) and key.id in constants:
            found.add(str(constants[key.id]))
        else:
            found |= TABLES[str(path.relative_to(ROOT))]
    return found


def test_environment_variables_are_those_that_are_read() -> None:
    read = set().union(*(variables_read(path) for path in sources(".py")))
    for path in sources(".cpp", ".h", ".cu"):
        read |= set(re.findall(r'getenv\(\s*"(\w+)"', path.read_text()))
    read |= set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rows = [line.split(" | ") for line in section("Environment variables").splitlines() if "| `" in line[:3]]
    readers = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert read <= set(readers), f"not listed: {read - set(readers)}"
    ours = {name for name, reader in readers.items() if "paracore" in reader or "our" in reader}
    assert ours == read


# ---------------------------------------------------------------- code and links


@pytest.mark.parametrize("page", PAGES)
def test_code_is_python(page: str) -> None:
    text = (ROOT / page).read_text()
    for match in re.finditer(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        tree = compile(textwrap.dedent(match[1]), f"{page}:{line}", "exec", ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paracore"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), f"{page}:{line}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_files_of_the_layout_exist() -> None:
    names = re.findall(r"^(\S+)  ", section("Layout"), re.MULTILINE)
    assert len(names) > 10
    assert all((ROOT / name).exists() for name in names)


# ---------------------------------------------------------------- pictures

RESULTS = ROOT / "bench" / "results"


@pytest.mark.parametrize("name", plots.PICTURES)
def test_pictures_show_the_newest_results(name: str) -> None:
    made, path = plots.PICTURES[name](RESULTS), RESULTS / "plots" / name
    assert (made is not None) == path.exists(), "run python -m paracore.bench.plots"
    if made is not None:
        with Image.open(path) as picture:
            assert picture.info[plots.SOURCE] == made.source(), "run python -m paracore.bench.plots"
        assert path.stat().st_size < 60_000
        assert f"(bench/results/plots/{name})" in README


def test_the_same_results_make_the_same_bytes(tmp_path: Path) -> None:
    (table,) = RESULTS.glob("*-memory.csv")  # one picture is enough: all are saved alike
    (tmp_path / table.name).write_bytes(table.read_bytes())
    ((first,), (second,)) = (plots.draw(tmp_path, tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_of_two_measurements_the_newer_counts(tmp_path: Path) -> None:
    (old,) = plots.documents(RESULTS, "swiglu")
    shown = next(shown for shown in plots.OPERATIONS if shown.case == "swiglu")
    before, _ = shown.times([old])["float32"]
    text = old.path.read_text()
    (tmp_path / "a.json").write_text(text.replace("2026-11-30T", "2026-12-31T").replace(repr(before), "7.5"))
    (tmp_path / "b.json").write_text(text)
    assert shown.times(plots.documents(tmp_path, "swiglu"))["float32"][0] == 7.5


def test_results_of_other_conditions_are_left_out(tmp_path: Path) -> None:
    huge_pages = RESULTS / "2026-11-29-amd-epyc-avx2-rms_norm-huge-pages.json"
    (tmp_path / huge_pages.name).write_bytes(huge_pages.read_bytes())
    assert plots.documents(tmp_path, "rms_norm") == []
    with pytest.raises(UsageError, match="has no results"):
        plots.draw(tmp_path, tmp_path)


def test_fusing_is_drawn_once_it_is_measured(tmp_path: Path) -> None:
    (swiglu,) = plots.documents(RESULTS, "swiglu")
    turns = {"eager": 2.0, "fused": 1.0, "products by torch": 0.5}
    row = {
        "dtype": "float32",
        "model": {"layers": 8, "hidden": 512, "vocabulary": 32000, "sequence": 1024},
        "seconds": {name: {"median": median} for name, median in turns.items()},
        "peak_mib": {"eager": 900.0, "fused": 300.0},
    }
    document = {**swiglu.content, "case": "fuse", "results": [row]}
    (tmp_path / "fuse.json").write_text(json.dumps(document))
    (picture,) = plots.draw(tmp_path, tmp_path)
    assert picture.name == "fuse.png"
    made = plots.fuse(tmp_path)
    assert made is not None
    seconds, memory = made.figure.axes
    assert [bar.get_height() for bar in seconds.patches] == [2.0, 1.0, 0.5]
    assert [bar.get_height() for bar in memory.patches] == [900.0, 300.0]


def test_bars_are_what_the_files_say() -> None:
    made = plots.operations(RESULTS)
    assert made is not None
    (axes,) = made.figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert any(end == pytest.approx(24.09, abs=0.005) for end in ends)  # 16 documents, docs/figures.md
    assert min(ends) > 1
