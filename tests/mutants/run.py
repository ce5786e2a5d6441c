"""Apply one wrong change at a time to a copy of the tree, and say which test notices: `make mutants`.

    python tests/mutants/run.py                     all changes that have no result yet, two at once
    python tests/mutants/run.py --match 'window'    those whose name or file has this in it, again
    python tests/mutants/run.py --whole             survivors, by the whole default run

A change is noticed when a test of its list fails, perhaps by the limit of seconds that a test has, which passes without
the change. Where the tests do not come to an end within `--seconds`, nobody knows: it counts as survived. Results are
kept in a file as they come in, so a run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
PLACES = Path(__file__).with_name("places.toml")
NOTICED, SURVIVED, UNFINISHED = "noticed", "survived", "unfinished"
TEST_SECONDS = 300
"""A test that takes longer hangs, and counts as failed."""
NOTHING_RAN = 5
"""The exit code of pytest where it finds no tests: of a folder, none that did not run before."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """A wrong change: in `file`, below src/dilatant, `new` in the place of `old`. breaks: what a user would notice.
    tests: paths, in the order in which they run."""

    name: str
    set: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def changed(self, text: str) -> str:
        """The file's text with the change. Raises ValueError unless the place is there once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name!r}: its text occurs {count} times in src/dilatant/{self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a change. by: the test that noticed it. tests: what was run; "" of the whole default run."""

    verdict: str
    by: str
    seconds: float
    date: str
    tests: str


def read_places(path: Path = PLACES) -> tuple[Place, ...]:
    """All places of the list. Raises ValueError for a name that is there twice."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["place"]
    places = tuple(Place(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries)
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        raise ValueError(f"names occur twice: {sorted({name for name in names if names.count(name) > 1})}")
    return places


def check(places: Iterable[Place], source: Path = ROOT / "src" / "dilatant") -> list[str]:
    """What is wrong with the list: texts that do not occur once any more, and changes that are no Python."""
    problems = []
    for place in places:
        try:
            text = place.changed((source / place.file).read_text(encoding="utf-8"))
            compile(text, place.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{place.name}: {error}")
    return problems


def copy_tree(folder: Path) -> None:
    """What git knows of the tree, or would be told of."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def try_change(place: Place, folder: Path, tests: Sequence[str], seconds: float) -> Result:
    """Run `tests` (none: all of the default run) with the change in the copy at `folder`, which is as before then.
    Raises RuntimeError where a test fails without the change, too, or none can be run."""
    file = folder / "src" / "dilatant" / place.file
    before = file.read_text(encoding="utf-8")
    write_source(file, place.changed(before))
    # Numba does not see that a function has changed which a compiled one of another file calls.
    kernels = tempfile.TemporaryDirectory(dir=folder) if "njit" in before else nullcontext(folder / "kernels")
    began = time.monotonic()
    try:
        with kernels as cache:
            failed = ""
            # One by one: pytest would run the nearest tests where the folder that also holds them comes.
            for number, path in enumerate(tests or ("tests",)):
                earlier = [f"--ignore={each}" for each in tests[:number]]
                left = began + seconds - time.monotonic()
                failed = _first_failure(folder, [path, *earlier], left, cache)
                if failed != "":
                    break
    finally:
        write_source(file, before)
    spent = round(time.monotonic() - began, 1)
    if failed and _first_failure(folder, [failed], seconds, folder / "kernels") != "":
        raise RuntimeError(f"{place.name}: {failed} does not pass without the change")
    verdict = UNFINISHED if failed is None else NOTICED if failed else SURVIVED
    return Result(verdict, failed or "", spent, time.strftime("%Y-%m-%d"), " ".join(tests))


def write_source(file: Path, text: str) -> None:
    """Write a source file, and remove its compiled one, which Python trusts if length and second of writing agree."""
    file.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(file))).unlink(missing_ok=True)


def _first_failure(folder: Path, tests: Sequence[str], seconds: float, kernels: str | Path) -> str | None:
    """The first test that fails, "" for none; None where they do not end in time. Raises RuntimeError where pytest runs
    no tests."""
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    environment["NUMBA_CACHE_DIR"] = str(kernels)
    process = subprocess.Popen(
        [*command, *tests], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the ranks that tests have started
        process.communicate()
        return None
    found = _FAILED.search(output)
    if process.returncode == 0 or (process.returncode == NOTHING_RAN and len(tests) > 1):
        return ""
    if found is None:
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")
    return found[1]


def table(places: Iterable[Place], results: Mapping[str, Result]) -> str:
    """Places with their results, in Markdown."""
    rows = ["| change | place | breaks | verdict | noticed by | seconds | date |", "|---|---|---|---|---|---|---|"]
    for place in places:
        found = results.get(place.name)
        shown = ("not run", "", "", "") if found is None else (
            found.verdict, f"`{found.by}`" if found.by else "", f"{found.seconds:.0f}", found.date
        )  # fmt: skip
        rows.append(f"| {place.name} | `{place.file}` | {place.breaks} | {' | '.join(shown)} |")
    return "\n".join(rows) + "\n"


def _load(path: Path) -> dict[str, Result]:
    if not path.is_file():
        return {}
    return {name: Result(**entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items()}


def _save(path: Path, results: Mapping[str, Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({k: asdict(v) for k, v in results.items()}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns how many changes nobody noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only places with this in their name or file, and again")
    parser.add_argument("--set", choices=("fresh", "known"), help="only places of this set")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--whole", action="store_true", help="survivors, by the whole default run")
    parser.add_argument("--jobs", type=int, default=2, help="changes at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest that the tests of a change may take")
    parser.add_argument("--page", type=Path, help="also write the table into this file, as README.md beside this one")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.json")
    options = parser.parse_args(arguments)
    everything = places = read_places()
    problems = check(places)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return len(problems)
    places = tuple(p for p in places if options.set in (None, p.set) and options.match in f"{p.name} {p.file}")
    results = _load(options.results)
    again = options.again or bool(options.match)
    todo = [p for p in places if again or p.name not in results]
    if options.whole:
        todo = [p for p in places if p.name in results and results[p.name].verdict != NOTICED]
    with tempfile.TemporaryDirectory(prefix="dilatant-mutants-") as scratch:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(options.jobs, len(todo))):
            copy_tree(Path(scratch) / str(number))
            folders.put(Path(scratch) / str(number))

        def run(place: Place) -> tuple[Place, Result]:
            folder = folders.get()
            try:
                tests = () if options.whole else place.tests
                return place, try_change(place, folder, tests, options.seconds)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for ended in as_completed([pool.submit(run, place) for place in todo]):
                try:
                    place, result = ended.result()
                except RuntimeError as error:
                    print(error, file=sys.stderr, flush=True)
                    continue
                results[place.name] = result
                _save(options.results, results)
                print(f"{result.verdict:10} {result.seconds:6.1f} s  {place.name}  {result.by}", flush=True)
    print("\n" + table(places, results))
    if options.page is not None:
        head, _, _ = options.page.read_text(encoding="utf-8").partition("| change |")
        options.page.write_text(head + table(everything, results), encoding="utf-8")
    verdicts = [results[place.name].verdict for place in places if place.name in results]
    print(f"{verdicts.count(NOTICED)} of {len(verdicts)} noticed")
    return len(places) - verdicts.count(NOTICED)


if __name__ == "__main__":
    sys.exit(min(1, main()))
