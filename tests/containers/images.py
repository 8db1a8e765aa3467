"""Build the images of `docker/` without an engine, a registry or a name of one.

The base that the Dockerfiles name is a Debian without documentation. Here it is made from the
mirror that this machine's apt uses; everything else is what the Dockerfiles say. pip's
configuration goes in as a build secret, and folders that it names are mounted.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# The Debian of the base that an image is built on here. Where torch comes from a folder of this
# machine, it is for the older one's Python; of an index it may be CUDA's alone, which is large.
DEBIAN = {"reducer": "trixie", "worker": "bookworm"}
TOOLS = ("buildah", "podman", "runc", "debootstrap", "ip", "tc")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # where the Dockerfiles mount the secret `ca`

# As Debian's own "slim" images leave documentation out.
WASTE = ("doc", "info", "locale", "man")
SLIM = "".join(f"path-exclude /usr/share/{part}/*\n" for part in WASTE)


class Unavailable(RuntimeError):  # noqa: N818 (it is a condition of the machine)
    """What is needed cannot be had here; the message says what."""


def check_tools():
    """Raise `Unavailable` where images cannot be built and run."""
    if os.geteuid() != 0:
        raise Unavailable("needs root, for containers on hosts of a lab")
    for tool in TOOLS:
        if not shutil.which(tool):
            raise Unavailable(f"there is no `{tool}`: `make container-tools` installs it")
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        raise Unavailable("the kernel refuses namespaces")


def base(name):
    """Return the base of an image, ``reducer`` or ``worker``."""
    return f"localhost/reduction-base:{DEBIAN[name]}"


def make_base(name, folder):
    """Import the base of an image from apt's mirror, unless an earlier run has."""
    if not subprocess.run(["podman", "image", "exists", base(name)], check=False).returncode:
        return
    root = folder / "base"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", DEBIAN[name], root, mirror()],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise Unavailable(f"debootstrap made no base: {made.stdout[-300:]}{made.stderr[-300:]}")
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(SLIM)
    for part in WASTE:
        shutil.rmtree(root / "usr/share" / part, ignore_errors=True)
    for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / waste)
        (root / waste / "partial").mkdir(parents=True)
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
        command = ["podman", "import", "--quiet", "-", base(name)]
        subprocess.run(command, stdin=packed.stdout, capture_output=True, check=True)
    shutil.rmtree(root)


def build(name, folder):
    """Build ``docker/NAME.Dockerfile`` and return the image's name."""
    image = f"localhost/reduction-{name}:test"
    command = ["buildah", "bud", "--isolation=chroot", "--layers", "--format=docker", "--quiet"]
    # The torch of all other tests: of a newer one an index may have CUDA's alone, which is large.
    (torch,) = re.findall("^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    torch_here = [f"--build-arg=TORCH={torch}"] if name == "worker" else []
    command += [f"--build-arg=BASE={base(name)}", *torch_here, f"--tag={image}"]
    secrets, folders = pip_here(folder)
    command += [f"--secret=id={name},src={path}" for name, path in secrets.items()]
    command += [f"--volume={path}:{path}:ro" for path in folders]
    command += ["--file", str(ROOT / f"docker/{name}.Dockerfile"), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return image


def mirror():
    """Return where this machine's apt has Debian from."""
    command = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        label, _, address = line.partition(" ")
        if label == "Debian":
            return address
    raise Unavailable("apt knows no mirror of Debian: run `apt-get update` first")


def pip_here(folder):
    """Return what pip needs here besides itself: files, by secret, and folders."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Environment beats files, and comes first.
    lines = (line.partition("=") for line in reversed(listed.splitlines()))
    settings = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in lines}
    settings.pop("constraint", None)  # a file of this machine; the images have one of their own
    secrets = {"pip": folder / "pip.conf"}
    if "cert" in settings:
        secrets["ca"] = Path(settings["cert"])
        settings["cert"] = CERTIFICATES
    words = [f"{name} = {' '.join(value.split())}\n" for name, value in settings.items()]
    secrets["pip"].write_text("[global]\n" + "".join(words))
    folders = []
    for name in ("index-url", "extra-index-url", "find-links"):
        for place in settings.get(name, "").split():
            local = Path(place.removeprefix("file://"))
            if place.startswith("file://"):
                local = local.parent  # an index points into a folder beside it
            if local.is_absolute() and local.is_dir() and local != Path("/"):
                folders.append(local)
    return secrets, folders
