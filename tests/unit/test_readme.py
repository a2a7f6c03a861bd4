"""What the README and the recipes tell people to type exists and is accepted."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import diagrams
import figures
import pytest

from ringtrain.config import files, sections
from ringtrain.errors import ConfigError
from ringtrain.training import run, script_options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = sorted(path.parent for path in (ROOT / "ringtrain").glob("*/**/__init__.py"))
RECIPES = sorted((ROOT / "configs").glob("*.toml"))
COMMAND = re.compile(r"python -m ringtrain\.train((?: +[^\s`|#)]+)*)")


def commands(text: str) -> list[str]:
    return [match.strip() for match in COMMAND.findall(text)]


TEXTS = (README, *(path.read_text() for path in (*PAGES, *RECIPES)))
TOLD = {command for text in TEXTS for command in commands(text)}


@pytest.mark.parametrize("command", sorted(command for command in TOLD if "--help" not in command))
def test_a_training_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files.read(shlex.split(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_configuration_in_a_page_is_accepted(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / "block.toml").write_text(block + "\n[train]\nepochs = 90\n" * ("[train]" not in block))
        files.read_toml(tmp_path / "block.toml")


def test_a_wrong_command_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = commands("`horovodrun -np 2 python -m ringtrain.train --config configs/digits.toml --train.epoch 3`")
    with pytest.raises(ConfigError):
        files.read(shlex.split(command))


def test_every_block_of_python_is_run_by_a_test_on_ranks() -> None:
    """Whole scripts begin with Keras: see tests/pages.py. The others are named by their first line."""
    folders = ("ring", "spark")
    tests = "".join(path.read_text() for folder in folders for path in (ROOT / "tests" / folder).glob("*.py"))
    blocks = [first for text in TEXTS for first in re.findall(r"^```python\n(.*?)(?:  #|[\n(:])", text, re.MULTILINE)]
    assert len(blocks) > 15
    assert not [first for first in blocks if first != "import keras" and first not in tests]


def test_every_recipe_names_its_own_file_and_what_it_reaches() -> None:
    assert RECIPES
    for recipe in RECIPES:
        header = "".join(line for line in recipe.read_text().splitlines(True) if line.startswith("#"))
        assert f"--config configs/{recipe.name}" in header
        assert re.search(r"\d s of training.*\d % test accuracy", header, re.DOTALL), recipe


def tree(text: str) -> list[str]:
    """Paths in a picture of the tree, as the first block of a section."""
    picture = text.split("```")[1]
    paths, folders = [], [""]
    for line in filter(None, picture.splitlines()):
        indent = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0]
        folders = folders[: indent + 1]
        paths.append(folders[-1] + names)
        folders.append(folders[-1] + names if names.endswith("/") else folders[-1])
    return paths


def test_the_tree_is_as_it_is_drawn() -> None:
    """Folders in the README, files in CONTRIBUTING.md."""
    drawn = {*tree(README.split("## The tree")[1]), *tree(CONTRIBUTING.split("## Files")[1])}
    missing = [path for path in drawn if not (ROOT / path).exists()]
    assert not missing, f"drawn, but not there: {missing}"
    shown = {f"{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in (ROOT / "ringtrain").iterdir()}
    undrawn = (
        shown
        - drawn
        - {"ringtrain/__pycache__/", "ringtrain/__init__.py", "ringtrain/__main__.py", "ringtrain/py.typed"}
    )
    assert not undrawn, f"there, but not drawn: {undrawn}"


def test_every_page_is_in_the_list_of_pages_and_in_the_site() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    in_site = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(README.splitlines()) <= 170
    assert {*listed, "index.md"} == {*in_site} == {page.name for page in PAGES}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_lists_its_files(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"^(\w+): +\S", docstring, re.MULTILINE)
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert sorted(listed) == sorted(files | {path.parent.name for path in folder.glob("*/__init__.py")})


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"(?:`|^|MPI=\w+ )make ([a-z-]+)", README + CONTRIBUTING, re.MULTILINE)))
)
def test_a_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def names_of_pages(source: str) -> list[str]:
    """Texts of a module that name a page, which an installed package lacks; docstrings may."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in texts if id(node) not in docstrings and re.search(r"docs/[\w-]+\.md", node.value)]


def test_no_message_sends_to_a_page_that_an_installed_package_lacks() -> None:
    sources = {path: path.read_text() for path in (ROOT / "ringtrain").rglob("*.py")}
    assert {path: named for path, text in sources.items() if (named := names_of_pages(text))} == {}
    assert names_of_pages('"""See docs/a.md."""\nprint("see docs/fit.md")') == ["see docs/fit.md"]
    # Docstrings of options are their help texts.
    for name in ("config/sections.py", "cluster/launch_options.py"):
        assert not re.search(r"docs/[\w-]+\.md", sources[ROOT / "ringtrain" / name])


# ---- links and pictures ----------------------------------------------------------------------------------------------


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a page to files, or to headings in them, that do not exist."""
    dead = []
    for path, heading in re.findall(r"\]\((?!https?:)([^()#\s]*)#?([^()\s]*)\)", text):
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings(target.read_text())):
            dead.append(f"{path}#{heading}")
    return dead


def headings(text: str) -> set[str]:
    """Names of a page's headings in links."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []
    wrong = "[a](nowhere.md) [b](https://nowhere) [c](#nothing) [d](docs/fit.md#limit)"
    assert dead_links(ROOT / "README.md", wrong) == ["nowhere.md#", "#nothing", "docs/fit.md#limit"]


def test_pictures_are_small_and_load_nothing() -> None:
    pictures = [*(ROOT / "docs" / "images").iterdir()]
    shown = "".join(page.read_text() for page in PAGES) + README + CONTRIBUTING
    assert {path.name for path in pictures} == set(re.findall(r"\((?:docs/)?images/([\w.-]+)\)", shown))
    for path in pictures:
        assert path.stat().st_size < 100_000, path
        if path.suffix == ".svg":
            assert not re.search(r"url\((?!#)|href=|<script", path.read_text()), path


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_diagram_is_as_its_script_draws_it(name: str) -> None:
    drawn = diagrams.DIAGRAMS[name]()
    assert (diagrams.FOLDER / name).read_text() == drawn, "run benchmarks/diagrams.py"


def test_the_plot_of_speed_shows_the_figures_of_its_page() -> None:
    part = figures.written(figures.PAGE.read_text())
    measured = figures.speeds(part)
    assert len(measured) > 4 and figures.PLOT.read_text() == figures.plot(part), "run benchmarks/figures.py"
    name = next(iter(measured))
    assert figures.PLOT.read_text() != figures.draw({**measured, name: [1, 1, 1]}, figures.DAY.findall(part)[0])


def test_the_table_of_figures_is_what_the_bench_has_measured() -> None:
    spread = {"median": 1234.5, "p10": 1000.0, "p90": 2000.0}
    found = {"title": "a", "images_per_s": spread, "first_step_s": {"median": 7.4}, "memory_mb": {"median": 1890}}
    found |= {"checksums": ["1", "1"], "equal": True}
    ratio = {"median": 1.234, "p10": 1, "p90": 2}
    other = {**found, "title": "b", "over": "ringtrain", "ratio": ratio, "same_weights": True}
    options = {"command": ["--model.name", "cnn"], "turns": 3, "steps": 60}
    results = {"a": found, "b": other, "c": {"title": "c", "error": "ValueError: no"}}
    lines = figures.table({"time_s": 1.0, "options": options, "results": results}).splitlines()
    assert lines[0] == "`cnn`, 3 rounds of 60 steps, 1 January 1970:"
    assert lines[4:] == [
        "| a | 1,234 (1,000 to 2,000) |  | 7 | 1.9 | equal |",
        "| b | 1,234 (1,000 to 2,000) | 1.23 (1.00 to 2.00) | 7 | 1.9 | as ringtrain's |",
        "| c | does not run: ValueError | | | | |",
    ]


def test_the_page_of_fit_names_what_fit_takes_and_refuses() -> None:
    page = (ROOT / "docs" / "fit.md").read_text()
    options = [option.rstrip(".") for option in sections.OF_SCRIPT]
    named = [*options, *script_options.STRATEGIES, *script_options.REFUSED, *set(run.ON_RANK_0) - {"ProgbarLogger"}]
    assert [name for name in named if f"`{name}`" not in page] == []
