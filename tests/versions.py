"""Run tests of what meets torch with other Pythons and other releases of torch.

``python -m tests.versions`` builds the wheel, and for each row of `ROWS` makes an environment in
build/versions with that Python, the wheel and that torch, and runs `TESTS` there, on what is
installed. What came of a row goes into docs/compatibility.json, of which docs/generate.py makes the
table in docs/compatibility.md. Rows may be named: ``python -m tests.versions "3.12 newest"``.

A Python is the one of its name in PATH; 3.14 and later come from Debian's packages where there is
none, if this is root of a Debian. A row that cannot be tried says why, unless an earlier run did.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.commands import run_command
from tests.containers.images import Unavailable, mirror

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "versions"
RESULTS = ROOT / "docs" / "compatibility.json"
FROM_DEBIAN = {"3.14", "3.15"}  # in unstable
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
OLDEST = re.findall(r"torch>=([\d.]+)", (ROOT / "pyproject.toml").read_text())[0]
ROWS = ("3.11 oldest", *(f"3.{minor} newest" for minor in range(11, 16)))
NEEDS = ("hypothesis", "ml_dtypes", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
INTEGRATION = ("torch_backend", "reconfigure", "ddp", "faults", "local_sgd", "outer", "wire_ddp")
CLIENT = ("cuda", "ddp_errors", "device_copies", "host_buffer", "rendezvous")
TESTS = (
    *(f"tests/integration/test_{name}.py" for name in INTEGRATION),
    *(f"tests/worker_client/test_{name}.py" for name in CLIENT),
)
SAY = """
import json, platform
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), "torch": version("torch"),
                  "numpy": version("numpy")}))
"""


def run(*command, **more):
    """Run a command; Unavailable, if it fails, with the last line that it wrote."""
    done = run_command(*command, env={**OUTSIDE, **more})
    if done.returncode:
        last = (done.stderr + done.stdout).strip().rpartition("\n")[2]
        raise Unavailable(last.replace(f"{ROOT}/", ""))


def wheel():
    """Compile the wheel for every Python, and return it."""
    folder = BUILD / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps")
    run(*pip, "-w", folder, ROOT, REDUCTION_BUILD_STABLE_ABI="1")
    (built,) = folder.glob("*.whl")
    return built


def copy_tests():
    """Copy the checkout without the two packages, so that tests import what is installed."""
    folder = BUILD / "checkout"
    shutil.rmtree(folder, ignore_errors=True)
    files = run_command("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout
    for name in files.splitlines():
        if not name.startswith(("reducer/", "worker_client/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def interpreter(version):
    """Return the Python of a version."""
    named = shutil.which(f"python{version}")
    if named and not run_command(named, "-c", "import venv").returncode:
        return Path(named)
    can = os.geteuid() == 0 and all(map(shutil.which, ("debootstrap", "patchelf")))
    if version not in FROM_DEBIAN or not can:
        raise Unavailable(f"no python{version} was installed")
    return from_debian(version)


def from_debian(version):
    """Return a Python of Debian unstable, in a tree of its own with the C library that it needs.

    Its program is told where they are; so it runs as any other here, and starts what it likes.
    """
    tree = BUILD / f"debian-{version}"
    python = tree / "usr/bin" / f"python{version}"
    if not python.exists():
        include = f"--include=python{version}-venv"
        run("debootstrap", "--variant=minbase", include, "sid", tree, mirror())
        library = f"usr/lib/{os.uname().machine}-linux-gnu"
        (loader,) = (tree / library).glob("ld-linux-*.so.*")
        paths = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", tree / library)
        run("patchelf", *paths, python)
    return python


def tried(row, package, checkout):
    """Make a row's environment, run the tests, and return what came of it."""
    version, release = row.split()
    home = BUILD / row.replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    run(interpreter(version), "-m", "venv", "--without-pip", home)
    python = home / "bin/python"
    torch = f"torch=={OLDEST}.0" if release == "oldest" else "torch"  # the newest by itself
    # Environments have torch's libraries in common, by links to uv's cache.
    run("uv", "pip", "install", "-q", "--no-build", "--python", python, package, torch, *NEEDS)
    report = home / "report.xml"
    command = [python, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--tb=short", "-rfEs"]
    command += ["-m", "not extended", f"--junit-xml={report}", *TESTS]
    subprocess.run(command, cwd=checkout, env=OUTSIDE, check=False)
    (suite,) = ET.parse(report).getroot()  # noqa: S314 (pytest wrote it)
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    said = run_command(python, "-c", SAY, env=OUTSIDE).stdout
    shutil.rmtree(home)
    return {
        **json.loads(said),
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main(rows):
    """Try rows, all if none is named, and return 1 if a test has failed."""
    package, checkout = wheel(), copy_tests()
    for row in rows or ROWS:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        try:
            results[row] = tried(row, package, checkout)
        except Unavailable as why:
            if "passed" not in results.get(row, {}):
                results[row] = {"untried": str(why)}
        print(row, results[row], flush=True)
        ordered = {name: results[name] for name in ROWS if name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    return any(results[row].get("failed") for row in rows or ROWS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
