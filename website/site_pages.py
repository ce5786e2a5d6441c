"""Pages of the documentation site that are made from code and from files outside docs/.

mkdocs builds docs/ and these pages (`make docs`). Nothing here is written into the repository.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/dilatant/dilatant"
COPIES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/recipes.md": "published_recipes.md",
}
"""File of the repository → its page in the site, where this is not its path below docs/."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def room_pages() -> dict[str, str]:
    """Return the README of each room of the package → its page in the site."""
    rooms = sorted((ROOT / "src/dilatant").glob("*/README.md"))
    return {file.relative_to(ROOT).as_posix(): f"rooms/{file.parent.name}.md" for file in rooms}


def decision_pages() -> list[str]:
    """Return the pages of decisions in the site, in the order of their numbers."""
    return [f"decisions/{file.name}" for file in sorted((ROOT / "docs/decisions").glob("*.md"))]


def generated_pages() -> dict[str, str]:
    """Return page in the site → its Markdown, for all pages that are no files of docs/."""
    copies = {page: link_within_site((ROOT / file).read_text(), file) for file, page in (COPIES | room_pages()).items()}
    made: dict[str, Callable[[], str]] = {
        "recipes.md": recipes_page,
        "cli.md": cli_page,
        "api.md": api_page,
        "troubleshooting.md": troubleshooting_page,
        "decisions/index.md": decisions_page,
    }
    return copies | {page: make() for page, make in made.items()}


def page_of(file: str) -> str | None:
    """Return the page in the site of a path in the repository, with an anchor where it is a part of a page; None if it
    is not part of the site."""
    if page := (COPIES | room_pages()).get(file):
        return page
    if file == "docs/decisions":
        return "decisions/index.md"
    if file.startswith("src/dilatant/recipes/"):
        return f"recipes.md#{Path(file).stem}"
    return file.removeprefix("docs/") if file.startswith("docs/") else None


def link_within_site(markdown: str, source: str) -> str:
    """Return a page's Markdown with links that hold in the site: to pages of the site, else to GitHub.

    source: path of the page's file in the repository, from which its links are relative. Raises ValueError for a link
    to a file that is not there.
    """
    here = posixpath.dirname(page_of(source) or source)

    def replaced(link: re.Match[str]) -> str:
        target, _, anchor = link[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / file).exists():
            raise ValueError(f"{source} links to {link[2]}, and there is no {file}")
        page = page_of(file)
        if page is None:
            kind = "tree" if (ROOT / file).is_dir() else "blob"
            found = f"{REPOSITORY}/{kind}/main/{file}"
        else:
            path, _, part = page.partition("#")
            found = posixpath.relpath(path, here or ".")
            anchor = anchor or part
        return f"{link[1]}{found}{'#' + anchor if anchor else ''}{link[3]}"

    blocks = _FENCE.split(markdown)
    return "".join(block if block.startswith("```") else _LINK.sub(replaced, block) for block in blocks)


def recipes_page() -> str:
    """Return the page of recipes: the text of each file."""
    from dilatant.config.start import recipe_texts

    lines = ["# Recipes", "", "`dilatant init NAME` writes one of these files, with your model and data filled in.", ""]
    for name, text in recipe_texts().items():
        summary, _, rest = text.partition("\n")
        lines += [f"## {name}", "", summary.removeprefix("# "), "", "```yaml", rest.rstrip(), "```", ""]
    return "\n".join(lines)


def decisions_page() -> str:
    """Return the list of decisions."""
    lines = ["# Decisions", "", "What was decided, why, and what was left.", ""]
    for page in decision_pages():
        title = (ROOT / "docs" / page).read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({posixpath.basename(page)})")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Return the reference of the command line, read from the typer application."""
    import typer

    from dilatant.cli.app import app

    root = typer.main.get_command(app)
    return "\n".join(["# Command line", "", root.help or "", "", *_verbs(root, "dilatant")])


def _verbs(command: Any, name: str) -> Iterator[str]:
    for verb, each in sorted(getattr(command, "commands", {}).items()):
        whole = f"{name} {verb}"
        yield from (f"## {whole}", "", _sentences(each.help), "")
        if hasattr(each, "commands"):
            yield from _verbs(each, whole)
            continue
        rows = [_row(parameter) for parameter in each.params if not getattr(parameter, "hidden", False)]
        usage = " ".join([whole, "[OPTIONS]", *(_argument(one) for one in each.params if _is_argument(one))])
        yield from ("```text", usage, "```", "", "| argument or option | meaning |", "|---|---|", *rows, "")


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper().replace("|", " or ") + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    """Return the row of a table that describes an argument or an option."""
    names = _argument(parameter) if _is_argument(parameter) else ", ".join(parameter.opts + parameter.secondary_opts)
    default = parameter.default
    shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    meaning = _sentences(parameter.help) + (f" Default: `{default}`." if shown else "")
    return f"| `{names}` | {_cell(meaning)} |"


def _sentences(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def api_page() -> str:
    """Return the page of the public names, whose docstrings and signatures mkdocstrings fills in."""
    import dilatant

    lines = [
        "# Python interface",
        "",
        "Each name is imported from `dilatant`; [python.md](python.md) shows their use.",
        "",
    ]
    for name in sorted(dilatant.__all__, key=str.lower):
        members = [] if name != "Config" else ["    options:", "      members: false"]
        lines += [f"::: dilatant.{name}", *members, ""]
    return "\n".join(lines)


def troubleshooting_page() -> str:
    """Return the page of error messages: each text that the code raises for the user, and where to read on.

    The text after a semicolon is what to do. `…` stands for a value of the run.
    """
    sections = _config_sections()
    rooms: dict[str, dict[str, str]] = defaultdict(dict)
    for file in sorted((ROOT / "src/dilatant").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        for message, line in _messages(ast.parse(file.read_text(encoding="utf-8"))):
            rooms[file.relative_to(ROOT / "src/dilatant").parts[0]].setdefault(message, f"{path}#L{line}")
    lines = [
        "# Troubleshooting by error message",
        "",
        "Search for a few words of the message. `…` stands for a value of your run: a key, a file, a sample, a rank.",
        "A mistake of the user ends a command with exit code 2; [resilience.md](resilience.md) has other exit codes.",
        "",
    ]
    for room in sorted(rooms):
        lines += [f"## {room}", "", "| message | what to do | keys | code |", "|---|---|---|---|"]
        for message, place in sorted(rooms[room].items(), key=lambda pair: pair[0].lstrip("… :'").lower()):
            wrong, _, remedy = message.partition("; ")
            keys = {key for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", message) if key.split(".")[0] in sections}
            links = ", ".join(f"[{key}](config.md#{key.split('.')[0]})" for key in sorted(keys))
            lines.append(
                f"| {_literal(wrong)} | {_literal(remedy)} | {links} | [source]({REPOSITORY}/blob/main/{place}) |"
            )
        lines.append("")
    return "\n".join(lines)


def _literal(text: str) -> str:
    """Return a text in a table's cell as it is, without Markdown of its own."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", lambda found: f"&#{ord(found[0])};", text)


def _config_sections() -> set[str]:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    return set(re.findall(r"^## (\w+)$", page, re.MULTILINE))


def _messages(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the text and line of each UserError and SampleError that a module makes with a text of its own. Those of
    samples are made of the sample's name, what is wrong, and what to do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
            parts = [_template(each) for each in node.args if not isinstance(each, ast.Starred)]
            text = {"UserError": parts[0] if parts else "", "SampleError": "; ".join(parts[1:3])}.get(node.func.id, "")
            if len(re.findall(r"[a-z]{2,}", text.partition("; ")[0])) > 2:
                yield " ".join(text.split()), node.lineno


def _template(node: ast.expr) -> str:
    """Return the text of an expression, with `…` for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "…"
