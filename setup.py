"""Extension modules, and the links of the package's description; pyproject.toml has the rest."""

import copy
import os
import re
import runpy
import subprocess
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

# What a debug build is watched by: memory, and what no C program may do; or data races.
WATCHED = {"1": "address,undefined", "threads": "thread"}.get(
    os.environ.get("REDUCTION_BUILD_DEBUG", "")
)
DEBUG = WATCHED is not None
# For every Python from 3.11 on, whose stable ABI has all that the extensions use; it has no buffers
# before. A build in place is for one Python alone: its name would come before this one's.
ABI3 = os.environ.get("REDUCTION_BUILD_STABLE_ABI") == "1"
# The address of the published repository, such as https://HOST/OWNER/NAME.
REPOSITORY = os.environ.get("REDUCTION_BUILD_REPOSITORY", "").rstrip("/")

# No -march=native and no -ffast-math: a wheel must run on any CPU, and the order of additions is
# the contract. -ffp-contract=off keeps a*b+c from becoming one rounding where the CPU has FMA.
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS.append("-Werror=format-security")
LINK_FLAGS = []
# Speed and hardening are a packager's to choose: CFLAGS and LDFLAGS, where they are set, stand
# alone. What is compiled here reads the bytes of strangers.
if DEBUG:
    FLAGS += ["-O0", "-g", f"-fsanitize={WATCHED}"]
    LINK_FLAGS += [f"-fsanitize={WATCHED}"]
elif not os.environ.get("CFLAGS"):
    FLAGS += ["-O3", "-g0", "-fstack-protector-strong"]
    FLAGS += ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]  # some compilers define another one
if not DEBUG and not os.environ.get("LDFLAGS"):
    LINK_FLAGS += ["-Wl,-z,relro,-z,now"]

ABI3_SINCE = 11  # Python 3.11 is the first with buffers
if ABI3:
    FLAGS.append(f"-DPy_LIMITED_API=0x03{ABI3_SINCE:02x}0000")

NEEDS = (
    "from its sources the package is compiled: install a C compiler, Python's headers, pkg-config "
    "and libsodium's headers (on Debian: apt-get install gcc libc6-dev python3-dev pkg-config "
    "libsodium-dev; on Fedora: dnf install gcc python3-devel pkgconf-pkg-config libsodium-devel), "
    "or install a wheel, which needs none of them"
)

KERNELS = "reducer/kernels"
# What speaks ZMTP, sans I/O, and over sockets.
ZMTP = [f"reducer/zmtp/{name}.c" for name in ("zmtp", "curve")]
# What calls libsodium.
SODIUM = {"reducer/zmtp/curve.c", "reducer.zmtp._keys"}
ENGINE = [*ZMTP, *(f"reducer/zmtp/{name}.c" for name in ("channel", "connection", "heartbeat"))]
# By its extension: what each is built from, besides its own .pyx.
SOURCES = {
    "reducer.kernels._kernels": [
        f"{KERNELS}/{name}.c"
        for name in ("dispatch", "fold_generic", "fold_avx2", "fold_avx512", "fold_neon")
    ],
    "reducer.engine._slots": ["reducer/engine/slots.c"],
    "reducer.runtime._loop": ["reducer/runtime/loop.c", "reducer/engine/slots.c", *ENGINE],
    "reducer.zmtp._keys": [],
    "worker_client.protocol._flight": (
        FLIGHT := [
            f"worker_client/protocol/{name}.c"
            for name in ("chunks", "cuts", "flight", "flight_failures", "numbering")
        ]
    ),
    "worker_client.runtime._loop": [
        "worker_client/runtime/core.c",
        "worker_client/runtime/loop.c",
        *FLIGHT,
        *ENGINE,
    ],
    "worker_client.fusion._tensor_queue": [],
    "worker_client.staging._cast": [
        f"worker_client/staging/cast_{name}.c"
        for name in ("dispatch", "generic", "avx2", "avx512", "neon")
    ],
}
# What NCCL loads: no module of Python's, though one extension to setuptools.
PLUGIN = "worker_client.nccl.libnccl-net-reduction"
PLUGIN_SOURCES = [
    f"worker_client/nccl/{name}.c"
    for name in ("plugin", "interfaces", "point_to_point", "collective", "interpreter")
]
# What a checkout has for its tests and its fuzzer, and no wheel: extensions, and failpoints in the
# loops (torture/failpoints).
TESTS = {"tests.zmtp._zmtp": ZMTP, "tests.zmtp._connection": [*ZMTP, "reducer/zmtp/channel.c"]}
TESTS = TESTS if Path("tests/zmtp/_zmtp.pyx").is_file() else {}  # an sdist has other tests
FAILPOINTS = [("REDUCTION_FAILPOINTS", None)] if Path("torture/failpoints").is_dir() else []
HEADERS = [
    str(path)
    for package in ("reducer", "worker_client", "torture")
    for path in Path(package).rglob("*.h")
]

# What Cython makes of every memoryview, compiled once instead of once in each module.
SHARED = "reducer._cyutility"


def jobs():
    """Return how many compilers may run at once: what make, or a package's build, says.

    Where neither does, as many as there are CPUs for this process.
    """
    said = " ".join(os.environ.get(name, "") for name in ("MAKEFLAGS", "DEB_BUILD_OPTIONS"))
    limits = re.findall(r"(?:-j ?|parallel=)(\d+)", said)
    return min(map(int, limits), default=len(os.sched_getaffinity(0)))


def libsodium(kind):
    """Return what pkg-config has the compiler (``--cflags``) or the linker (``--libs``) told."""
    command = [os.environ.get("PKG_CONFIG") or "pkg-config", kind, "libsodium"]
    try:
        return subprocess.check_output(command, text=True).split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"libsodium is not found: {error}\n{NEEDS}") from None


extensions = cythonize(
    [
        Extension(
            name,
            sources=[f"{name.replace('.', '/')}.pyx", *sources],
            depends=HEADERS + (ENGINE if name in TESTS else []),  # one of them includes another
            include_dirs=["."],
            libraries=["m"],
            py_limited_api=ABI3,
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        )
        for name, sources in (SOURCES | TESTS).items()
    ]
    + [
        Extension(
            SHARED,
            sources=["reducer/_cyutility.c"],
            py_limited_api=ABI3,
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        ),
        Extension(
            PLUGIN,
            sources=PLUGIN_SOURCES,
            depends=HEADERS,
            include_dirs=["."],
            extra_link_args=LINK_FLAGS,
        ),
    ],
    nthreads=jobs(),
    shared_utility_qualified_name=SHARED,
    compiler_directives={
        "language_level": "3",
        "boundscheck": DEBUG,
        "wraparound": DEBUG,
        "initializedcheck": DEBUG,
        "cdivision": True,
    },
)


class BuildApart(build_ext):
    """Gives each extension a folder for its objects: some share sources, and all are built at once.

    Otherwise one may be linked with an object that another one is just writing.
    """

    def finalize_options(self):
        """Leave what is for tests to builds in place, such as that of an editable installation."""
        in_place = self.inplace or self.editable_mode
        self.distribution.ext_modules = [
            extension for extension in extensions if in_place or extension.name not in TESTS
        ]
        for extension in extensions:
            extension.define_macros = FAILPOINTS if in_place else []
        if self.inplace:
            self.build_lib = "build/in-place"  # no wheel is made of what is there
        super().finalize_options()

    def get_ext_filename(self, fullname):
        """Return where an extension goes; the plug-in is no module, and has no tag of a Python."""
        if PLUGIN.endswith(fullname):
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)

    def run(self):
        """Build all extensions; those that seal frames, or make keys, with libsodium."""
        cflags, libs = libsodium("--cflags"), libsodium("--libs")
        for extension in self.extensions:
            extension.extra_compile_args = FLAGS + cflags
            if extension.name == PLUGIN:  # NCCL shall see its tables alone
                extension.extra_compile_args += ["-fvisibility=hidden"]
            if SODIUM & {extension.name, *extension.sources}:
                extension.extra_link_args = LINK_FLAGS + libs
        super().run()

    def build_extension(self, ext):
        """Build one extension; threads do this side by side."""
        apart = copy.copy(self)
        apart.build_temp = str(Path(self.build_temp, ext.name))
        try:
            super(BuildApart, apart).build_extension(ext)
        except CCompilerError as error:
            raise CompileError(f"{ext.name}: {error}\n{NEEDS}") from None


def description():
    """Return the README as a package index shows it, beside none of the files that it names.

    Its links and pictures lead into the repository at this version's tag. Where the repository has
    no address, a link is left as its text, and a picture is left out.
    """
    tag = "v" + runpy.run_path("reducer/__init__.py")["__version__"]
    picture, link = (f"{REPOSITORY}/{kind}/{tag}" for kind in ("raw", "blob"))
    text = Path("README.md").read_text(encoding="utf-8")
    inside = r"\[([^]]*)\]\((?!\w+:)([^)]+)\)"
    text = re.sub(f"!{inside}\n*", rf"![\1]({picture}/\2)\n\n" if REPOSITORY else "", text)
    return re.sub(f"(?<!!){inside}", rf"[\1]({link}/\2)" if REPOSITORY else r"\1", text)


def addresses():
    """Return what an index shows beside the description."""
    pages = {"Repository": "", "Changes": "/blob/HEAD/CHANGELOG.md", "Issues": "/issues"}
    return {name: REPOSITORY + page for name, page in pages.items() if REPOSITORY}


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=addresses(),
    ext_modules=extensions,
    cmdclass={"build_ext": BuildApart},
    options={
        "build_ext": {"parallel": jobs()},
        **({"bdist_wheel": {"py_limited_api": f"cp3{ABI3_SINCE}"}} if ABI3 else {}),
    },
)
