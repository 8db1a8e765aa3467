"""The README's first commands, in a container of a Debian that has Python and no compiler."""

import platform
import re

import pytest

from tests.containers import images
from tests.containers.podman import OPTIONS, podman
from tests.wheels.built import wheel_of

PYTHON = """
export DEBIAN_FRONTEND=noninteractive
apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
if command -v gcc || command -v cc; then exit 9; fi
"""
CONSTRAINTS = images.ROOT / "constraints.txt"


@pytest.mark.timeout(1200)
def test_the_first_commands_train_through_a_pool_and_so_do_embedded_ranks(tmp_path):
    wheel = wheel_of(platform.machine())
    try:
        images.check_tools()
        images.make_base("worker", tmp_path)
    except images.Unavailable as reason:
        pytest.skip(str(reason))
    secrets, folders = images.pip_here(tmp_path)
    volumes = {wheel: f"/{wheel.name}", CONSTRAINTS: "/constraints.txt"}
    volumes[secrets["pip"]] = "/etc/pip.conf"
    volumes |= {folder: str(folder) for folder in folders}
    readme = (images.ROOT / "README.md").read_text()
    (commands,) = re.findall(r"\n((?:    .+\n)+)\n    make demo", readme)
    options = [f"--volume={source}:{target}:ro" for source, target in volumes.items()]
    options += ["--rm", "--network=host", "--env=PIP_CONSTRAINT=/constraints.txt", *OPTIONS]
    if "ca" in secrets:  # Debian's Python brings a package that writes where images have it
        options += [f"--volume={secrets['ca']}:/ca.crt:ro", "--env=PIP_CERT=/ca.crt"]
    script = f"{PYTHON}{commands}worker-client demo --reducers 0\n"
    done = podman("run", *options, images.base("worker"), "bash", "-euxo", "pipefail", "-c", script)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert len(commands.splitlines()) == 3
    assert done.stdout.count("largest weight difference to Gloo") == 2
