"""The container image is pinned and holds no secrets; a release is installed and run before it is published."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from cases.planning.planning_verbs import FEW
from cases.tiny_project import write_project

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SECRET = re.compile(r"token|secret|passw|api_?key|credential", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions as (name, arguments), each in one line."""
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_is_pinned_and_runs_as_no_root() -> None:
    found = instructions()
    names = [name for name, _ in found]
    (base,) = (rest for name, rest in found if name == "FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d\d\.\d\d", base), "one release of CUDA"
    users = [rest for name, rest in found if name == "USER"]
    assert users[-1].isdigit(), "a number, which Kubernetes can tell from root's"
    assert int(users[-1]) > 0
    assert names.index("USER") > max(at for at, name in enumerate(names) if name in ("RUN", "COPY"))
    assert set(names) <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}, "no ADD, no ARG"
    for name, rest in found:
        assert not SECRET.search(rest), name
        if name == "CMD":
            assert rest.startswith("["), "no shell, which would keep signals from the run"
        if name == "WORKDIR":
            assert rest.startswith("/")
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists" in rest
        for command in rest.split("&&") if name == "RUN" else ():
            if "pip install" in command:
                assert "--no-cache-dir" in command
    for name, rest in found:
        for source in rest.split()[:-1] if name == "COPY" else ():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("no hadolint: the Dockerfile is only held to the rules of this file")
    subprocess.run(["hadolint", ROOT / "Dockerfile"], check=True)


def test_the_image_installs_what_the_project_allows() -> None:
    text = " ".join(rest for name, rest in instructions() if name == "RUN")
    pins = dict(re.findall(r"([a-z]+)==([\d.]+)", text))
    assert set(pins) == {"torch", "triton"}
    needed = [Requirement(each) for each in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"])]
    for name, version in pins.items():
        (requirement,) = (each for each in needed if each.name == name)
        assert version in requirement.specifier
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_a_release_is_published_without_a_token_after_it_ran() -> None:
    found = workflow()
    assert found[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` so
    assert found["permissions"] == {}
    build, publish = found["jobs"]["build"], found["jobs"]["publish"]
    assert build["permissions"] == {"contents": "read"}
    assert (publish["permissions"], publish["needs"]) == ({"id-token": "write"}, "build")
    assert publish["environment"] == "pypi"
    assert not any("run" in step for step in publish["steps"]), "it only uploads what was built"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    commands = "\n".join(step.get("run", "") for step in build["steps"])
    assert re.search(r"python3 -m build$", commands, re.MULTILINE), "wheel and sdist"
    assert {"*.whl", "*.tar.gz"} <= set(re.findall(r"dist/(\*[.\w]+)", commands))
    assert "bin/dilatant doctor" in commands


def test_workflows_run_targets_that_there_are_and_may_only_read() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run: dict[str, set[str]] = {}
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        found = yaml.safe_load(file.read_text())
        assert "secrets." not in file.read_text(), file.name
        for name, job in found["jobs"].items():
            granted = job.get("permissions", found["permissions"])
            assert set(granted.values()) == {"read"} or (file.stem, name) == ("release", "publish"), file.name
            assert job["timeout-minutes"] <= 360, "GitHub's own limit"
            run.setdefault(file.stem, set()).update(
                made for step in job["steps"] for made in re.findall(r"make (\w+)", step.get("run", ""))
            )
    assert set.union(*run.values()) <= targets
    assert run == {"docs": {"docs"}, "release": set(), "tests": {"test", "slow"}}
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert {"push", "pull_request"} <= set(tests[True])
    pythons = tests["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert {f"Programming Language :: Python :: {each}" for each in pythons} <= set(PROJECT["classifiers"])


@pytest.mark.parametrize(("tag", "code"), [(f"v{PROJECT['version']}", 0), ("v999.0", 1)])
def test_a_tag_of_another_version_is_not_released(tag: str, code: int) -> None:
    (check,) = (step["run"] for step in workflow()["jobs"]["build"]["steps"] if "version" in step.get("name", ""))
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", check], cwd=ROOT, env=environment)
    assert done.returncode == code


@pytest.mark.slow
def test_a_wheel_holds_what_the_commands_read(tmp_path: Path) -> None:
    """Installed in an environment of its own, which finds the libraries of this one behind it."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("hatchling cannot be fetched, so that no wheel is built and tried")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", "src/dilatant"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {name.removeprefix("src/") for name in listed.stdout.splitlines()}
    place = tmp_path / "venv"
    venv.create(place)
    install = [sys.executable, "-m", "pip", f"--python={place}/bin/python", "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "--quiet", wheel], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    project = write_project(tmp_path / "project")
    cluster = ("--set", "cluster.hardware=H100", "--set", "cluster.gpus_per_node=2")
    for arguments in (("--version",), ("init",), ("init", "vlm-lora"), ("doctor", "--json"),
                      ("plan", project / "config.yaml", *cluster, *FEW)):  # fmt: skip
        command = [place / "bin" / "dilatant", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "vlm-lora.yaml").is_file()
    assert "</html>" in (project / "run" / "plan" / "plan.html").read_text()
    where = [place / "bin" / "python", "-c", "import dilatant; print(dilatant.__file__)"]
    done = subprocess.run(where, env=alone, capture_output=True, text=True)
    assert Path(done.stdout).is_relative_to(place)
