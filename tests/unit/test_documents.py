"""README and ``docs/``: links lead somewhere, and what they list is what the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.cli import app
from shared.requests import Ask, Decision, FrontendResult, FrontendTool, Image, Retry, Target, ToolDecisions
from worker import jobs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REQUESTS = (Ask, ToolDecisions, Retry)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text_of(page), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def documented_arguments() -> dict[str, str]:
    """Name → where it belongs, from the table of job arguments."""
    table = text_of(ROOT / "docs" / "concepts.md").split("\n## Jobs\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (`.+?`(?: †|, `\w+`)*) \| .+? \| (ask|all) \|", table, re.MULTILINE)
    return {name: belongs for names, belongs in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_job_argument_is_in_the_table() -> None:
    every = set.intersection(*(set(kind.model_fields) for kind in REQUESTS)) - {"kind"}
    assert documented_arguments() == {
        name: "all" if name in every else "ask" for name in Ask.model_fields if name != "kind"
    }


def test_the_parts_of_arguments_are_named() -> None:
    page = text_of(ROOT / "docs" / "concepts.md")
    for part in (Decision, FrontendResult, FrontendTool, Image, Target):
        for name in part.model_fields:
            assert re.search(rf'[`"]{name}[`"]', page), f"{part.__name__}.{name}"


def test_the_jobs_are_described() -> None:
    page = text_of(ROOT / "docs" / "concepts.md")
    assert all(f"`{name}" in page for name in jobs.FUNCTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_json_examples_are_json(page: Path) -> None:
    for block in blocks(page, "json"):
        decoder, rest = json.JSONDecoder(), block.strip()
        while rest:
            _, end = decoder.raw_decode(rest)
            rest = rest[end:].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page: Path) -> None:
    known = {
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback
    }
    shown = set(re.findall(r"(?:`|\$ |bin/|^|worker-1 )turnkeeper ([a-z-]+)", text_of(page), re.MULTILINE))
    assert shown <= known, shown - known
