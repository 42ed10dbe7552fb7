"""The installed packages match the repository, with exact versions and without a host name."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvtier

REPOSITORY = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINNED = re.compile(r"[a-z0-9._-]+==[0-9][A-Za-z0-9.+!]*")

STOCK_IMAGE = {
    "blake3",
    "msgspec",
    "numpy",
    "prometheus-client",
    "psutil",
    "pydantic",
    "pyyaml",
    "pyzmq",
}
"""What vLLM's own image holds; torch comes with it as well and is not declared."""


def lines(name: str) -> list[str]:
    return (REPOSITORY / name).read_text().splitlines()


def pins() -> dict[str, str]:
    split = (line.partition("==") for line in lines("constraints.txt"))
    return {canonicalize_name(name): version for name, _, version in split}


@pytest.mark.parametrize("name", ["constraints.txt", "overrides.txt", "tools/uv.txt"])
def test_every_line_names_a_package_and_its_exact_version(name: str) -> None:
    assert lines(name)
    assert [line for line in lines(name) if not PINNED.fullmatch(line)] == []


def test_no_package_is_pinned_twice() -> None:
    assert len(pins()) == len(lines("constraints.txt"))


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_is_pinned_at_a_version_that_it_allows(extra: str) -> None:
    for requirement in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
        if requirement.name == "kvtier":
            continue
        assert Version(pins()[canonicalize_name(requirement.name)]) in requirement.specifier, str(
            requirement
        )


def test_an_override_is_pinned_at_the_version_it_asks_for() -> None:
    for line in lines("overrides.txt"):
        name, _, version = line.partition("==")
        assert pins()[name] == version


def test_build_requirements_are_pinned() -> None:
    system = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]
    for requirement in map(Requirement, system["requires"]):
        assert Version(pins()[requirement.name]) in requirement.specifier


def test_the_connector_needs_only_what_a_stock_engine_image_holds() -> None:
    assert {
        canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]
    } == STOCK_IMAGE


def imported(folder: str) -> set[str]:
    """Distributions of everything that the code below a folder imports."""
    modules: set[str] = set()
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.partition(".")[0])
    owners = metadata.packages_distributions()
    return {canonicalize_name(owner) for module in modules for owner in owners.get(module, ())} - {
        "kvtier"
    }


def declared(*extras: str) -> set[str]:
    given = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {canonicalize_name(Requirement(line).name) for line in given} - {"kvtier"}


def test_every_requirement_is_imported() -> None:
    assert (
        declared("cli", "tierd", "operator") - imported("connector") - imported("operator") == set()
    )


def test_the_operator_imports_nothing_that_only_another_package_brings() -> None:
    # Both are part of pydantic's interface, in the versions that it chooses.
    assert (
        imported("operator") - declared("cli", "operator") - {"annotated-types", "pydantic-core"}
        == set()
    )


def test_the_installed_distribution_has_the_command_tierd_and_the_plugin() -> None:
    distribution = metadata.distribution("kvtier")
    assert distribution.version == kvtier.__version__
    entries = {(entry.group, entry.name): entry.value for entry in distribution.entry_points}
    assert entries["console_scripts", "kvtier"] == "kvtier.cli.main:main"
    assert entries["console_scripts", "kvtier-tierd"] == "kvtier.tierd.__main__:main"
    assert entries["vllm.general_plugins", "kvtier"] == "kvtier.engines.vllm.plugin:register"


def test_the_command_is_a_plugin_of_kubectl_too() -> None:
    scripts = PROJECT["scripts"]
    assert scripts["kubectl-kvtier"] == scripts["kvtier"]


def test_every_entry_point_can_be_loaded_but_the_one_that_needs_an_engine() -> None:
    for entry in metadata.distribution("kvtier").entry_points:
        if entry.group == "console_scripts":
            assert callable(entry.load())


def test_the_changelog_knows_the_version() -> None:
    assert f"## {kvtier.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()
