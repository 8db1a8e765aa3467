"""What is built for others: an archive of sources, and wheels of what a compiler makes of it."""

import email
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

import reducer
from tests.commands import run_command

ROOT = Path(__file__).parent.parent.parent
REPOSITORY = "https://example.org/someone/reduction"
PAGE = ("index.html", "page.css", "page.js", "icon.svg")
LINK = re.compile(r"(!?)\[[^]]*\]\(([^)]+)\)")
# Makes nothing, and notes what it is told, and whether another one runs meanwhile.
COMPILER = """#!/bin/sh
mkdir {notes}.one && alone=yes || echo beside another >>{notes}
echo "$@" >>{notes}
while test $# -gt 1; do
    test "$1" = -o && : >"$2"
    shift
done
test -z "$alone" || rmdir {notes}.one
"""
OF_A_PACKAGER = {
    "CFLAGS": "-O1 -g1",
    "LDFLAGS": "-Wl,-z,lazy",
    "DEB_BUILD_OPTIONS": "nocheck parallel=1",
}


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


@pytest.fixture(scope="module")
def unpacked(archive, tmp_path_factory):
    """What is in the archive of sources."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def compiled(unpacked, folder, **environment):
    """Build a wheel with a compiler that only takes notes; return the wheel and the notes."""
    compiler, notes = folder / "cc", folder / "notes"
    compiler.write_text(COMPILER.format(notes=notes))
    compiler.chmod(0o755)
    shutil.rmtree(unpacked / "build", ignore_errors=True)
    build("--wheel", "--outdir", folder, unpacked, CC=str(compiler), **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel, [line.split() for line in notes.read_text().splitlines()]


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_what_cannot_be_compiled_is_not_installed_and_says_what_to_install(unpacked, tmp_path):
    said = build("--wheel", "--outdir", tmp_path, unpacked, fails=True, CC="false")
    assert "false" in said
    assert "apt-get install gcc" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize("packager", [{}, OF_A_PACKAGER], ids=["nobody's", "packager's"])
def test_a_packagers_flags_and_number_of_compilers_hold(unpacked, tmp_path, packager):
    _, notes = compiled(unpacked, tmp_path, **{"CFLAGS": "", "LDFLAGS": "", **packager})
    assert packager == {} or ["beside", "another"] not in notes
    compilers = [words for words in notes if "-c" in words]
    linkers = [words for words in notes if "-shared" in words]
    assert compilers
    assert linkers
    for words in compilers:
        (*_, speed) = (word for word in words if word.startswith("-O"))
        assert speed == ("-O1" if packager else "-O3")
        hardened = {"-fstack-protector-strong", "-D_FORTIFY_SOURCE=3"} <= set(words)
        assert hardened == (not packager)
        assert {"-ffp-contract=off", "-Werror=format-security"} <= set(words)
    for words in linkers:
        assert ("-Wl,-z,relro,-z,now" in words) == (not packager)
        assert ("-Wl,-z,lazy" in words) == bool(packager)


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_a_wheel_holds_what_runs_and_its_description_leads_nowhere(unpacked, tmp_path):
    wheel, _ = compiled(unpacked, tmp_path)
    with ZipFile(wheel) as built:
        names = built.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(built.read(metadata))
    assert {f"reducer/monitoring/page/{name}" for name in PAGE} <= set(names)
    assert {"reducer/py.typed", "worker_client/py.typed"} <= set(names)
    assert [name for name in names if re.search(r"\.(c|h|pyx|pxd)$", name)] == []
    # Nobody said where the repository is: no link leads into it, and no text is lost.
    assert LINK.findall(described.get_payload()) == []
    assert "\nFailures has the guarantee in full, and what two settings" in described.get_payload()
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
