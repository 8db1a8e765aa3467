"""The commands that install, in a container of a Debian that has nothing but what pages ask for."""

import platform
import re
import subprocess

import pytest

from tests.containers import images
from tests.containers.podman import OPTIONS, podman
from tests.pages import blocks
from tests.wheels.built import wheel_of

APT = """
export DEBIAN_FRONTEND=noninteractive
apt-get update && apt-get install -y --no-install-recommends python3 python3-venv"""
NO_COMPILER = "if command -v gcc || command -v cc; then exit 9; fi"
CHECKOUT = """python3 -m venv reduction && . reduction/bin/activate
mkdir checkout && cd checkout && tar xf /checkout.tar"""
CONSTRAINTS = images.ROOT / "constraints.txt"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ["wheel", "checkout"])
def test_what_is_installed_trains_through_a_pool_and_embedded(what, tmp_path):
    wheel, checkout = wheel_of(platform.machine()), tmp_path / "checkout.tar"
    try:
        images.check_tools()
        images.make_base("worker", tmp_path)
    except images.Unavailable as reason:
        pytest.skip(str(reason))
    secrets, folders = images.pip_here(tmp_path)
    volumes = {CONSTRAINTS: "/constraints.txt", secrets["pip"]: "/etc/pip.conf"}
    volumes |= {folder: str(folder) for folder in folders}
    if what == "wheel":
        volumes[wheel] = f"/{wheel.name}"
        (commands,) = blocks("docs/compatibility.md", "sh", "Wheels")
        before = f"{APT}\n{NO_COMPILER}"
    else:
        archive = ("git", "archive", f"--output={checkout}", "HEAD")
        subprocess.run(archive, cwd=images.ROOT, check=True)
        volumes[checkout] = "/checkout.tar"
        readme = (images.ROOT / "README.md").read_text()
        (commands,) = re.findall(r"^    (pip install \. .*)$", readme, re.M)
        before = f"{APT} gcc libc6-dev python3-dev pkg-config libsodium-dev\n{CHECKOUT}"
    options = [f"--volume={source}:{target}:ro" for source, target in volumes.items()]
    options += ["--rm", "--network=host", "--env=PIP_CONSTRAINT=/constraints.txt", *OPTIONS]
    if "ca" in secrets:  # Debian's Python brings a package that writes where images have it
        options += [f"--volume={secrets['ca']}:/ca.crt:ro", "--env=PIP_CERT=/ca.crt"]
    script = f"{before}\n{commands}\nworker-client demo --reducers 0\n"
    done = podman("run", *options, images.base("worker"), "bash", "-euxo", "pipefail", "-c", script)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert done.stdout.count("largest weight difference to Gloo") == 2
