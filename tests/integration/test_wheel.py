"""What is built for others: an archive of sources, and wheels with and without a compiler."""

import email
import os
import re
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import numpy
import pytest

import reducer
from tests.commands import reduced_by, run_command

ROOT = Path(__file__).parent.parent.parent
REPOSITORY = "https://example.org/someone/reduction"
PAGE = ("index.html", "page.css", "page.js", "icon.svg")
LINK = re.compile(r"(!?)\[[^]]*\]\(([^)]+)\)")
# Of processes that are not to find this checkout.
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

NO_COMPILER = """
from reducer.runtime import implementation
from reducer import kernels
assert kernels.variants() == ("numpy",), kernels.variants()
assert implementation.select(None, kernels.select(None)) is implementation.PLAIN
"""


def build(*arguments, fails=False, **environment):
    # Without isolation, which takes minutes; that pyproject.toml names all that a build needs is
    # what every installation of the checkout shows.
    command = (sys.executable, "-m", "build", "--no-isolation", *arguments)
    done = run_command(*command, env={**os.environ, **environment})
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build("--sdist", "--outdir", folder, ROOT, REDUCTION_BUILD_REPOSITORY=REPOSITORY)
    (built,) = folder.iterdir()
    return built


@pytest.fixture
def unpacked(archive, tmp_path_factory):
    """What is in the archive of sources, and nothing that another test has built of it."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_what_is_built_for_others_is_compiled_or_not_built(unpacked, tmp_path):
    command = ("--wheel", "--outdir", tmp_path, unpacked)
    assert "false" in build(*command, fails=True, CC="false", REDUCTION_BUILD_REQUIRED="1")
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_without_a_compiler_the_plain_loops_serve(unpacked, tmp_path):
    build("--wheel", "--outdir", tmp_path, unpacked, CC="false")
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "home"
    venv.create(home)
    (packages,) = home.glob("lib/python*/site-packages")
    with ZipFile(wheel) as built:
        assert not [name for name in built.namelist() if name.endswith(".so")]
        assert {f"reducer/monitoring/page/{name}" for name in PAGE} <= set(built.namelist())
        (metadata,) = (name for name in built.namelist() if name.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(built.read(metadata))
        built.extractall(packages)
    # Our dependencies are those of this environment, but not the checkout that is installed there.
    (packages / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    said = reduced_by(home / "bin" / "python", code=NO_COMPILER, cwd=home, env=OUTSIDE)
    assert said == "plain [0. 1. 2. 3. 4.]"
    # Nobody said where the repository is: no link leads into it, and no text is lost.
    assert LINK.findall(described.get_payload()) == []
    assert "\nPerformance has the commands; `reducer plan` predicts" in described.get_payload()
    assert described.get_all("Project-URL") is None


@pytest.mark.extended
def test_links_of_the_description_lead_into_the_repository(archive):
    with tarfile.open(archive) as sources:
        (name,) = (name for name in sources.getnames() if re.fullmatch("[^/]+/PKG-INFO", name))
        packed = sources.extractfile(name)
        assert packed
        described = email.message_from_bytes(packed.read())
    assert described["Description-Content-Type"] == "text/markdown"
    assert described.get_all("Project-URL")
    assert all(REPOSITORY in url for url in described.get_all("Project-URL", []))
    given = LINK.findall((ROOT / "README.md").read_text())
    found = LINK.findall(described.get_payload())
    assert len(given) > 20
    places = {
        picture: f"{REPOSITORY}/{kind}/v{reducer.__version__}/"
        for picture, kind in (("!", "raw"), ("", "blob"))
    }
    assert found == [(picture, places[picture] + target) for picture, target in given]


@pytest.mark.extended
def test_the_archive_holds_sources_and_nothing_that_is_made_of_them(archive):
    with tarfile.open(archive) as sources:
        packed = {name.partition("/")[2] for name in sources.getnames()}
    listed = run_command("git", "ls-files", "reducer", "worker_client", cwd=ROOT)
    if listed.returncode:
        pytest.skip("this is no checkout of git's")
    inside = {name for name in packed if name.startswith(("reducer/", "worker_client/"))}
    files = {name for name in inside if "." in name.rpartition("/")[2]}
    assert files == set(listed.stdout.split())
