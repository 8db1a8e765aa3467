"""What Sphinx makes the site of: ``make docs`` builds it into build/docs.

Pages lie where they are read in the checkout, too, so the source folder is the whole tree, and only
what is named here is built. Their Markdown is plain: tables of contents are added to it as it is
read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.addnodes import pending_xref
from sphinx.ext.autodoc.mock import undecorate
from sphinx.util.inspect import safe_getattr

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # what is documented is this tree's, not what is installed

import reducer  # noqa: E402 (as above)

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

# -- what is built

project = "Reduction server"
version = release = reducer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
PARTS = {  # of the table of contents: pages, and titles that are shorter than their own
    "Begin": {
        "docs/tutorial": "Tutorial",
        "docs/gpt": "A GPT on two hosts",
        "docs/faq": "Questions",
        "docs/from-horovod": "Coming from Horovod",
        "docs/from-vertex": "Coming from Vertex AI",
        "docs/from-gloo": "Coming from Gloo or NCCL",
    },
    "Use": {
        "docs/frameworks": "Frameworks",
        "docs/horovod": "Horovod's interface",
        "docs/nccl": "NCCL",
        "docs/launchers": "Launchers",
        "docs/deployment": "Deployment",
        "docs/sizing": "Sizing",
        "docs/observing": "Observing",
        "docs/failures": "Failures",
        "docs/troubleshooting": "Troubleshooting",
        "docs/upgrading": "Upgrading",
        "docs/security": "Keys and limits",
        "docs/slow-links": "Slow links",
        "docs/leaves": "Leaves",
        "docs/performance": "Performance",
    },
    "Reference": {
        "docs/settings": "Settings",
        "docs/compatibility": "Compatibility",
        "docs/api": "API",
        "docs/glossary": "Glossary",
        "docs/architecture": "How it is built",
        "docs/protocol": "Wire protocol",
        "docs/conformance": "Conformance",
    },
    "Project": {
        "CONTRIBUTING": "Contributing",
        "SECURITY": "Security policy",
        "CHANGELOG": "Changes",
        "bench/README": "Benchmarks",
        "bench/notebook": "Notebook of measurements",
        "fuzz/README": "Fuzzing",
    },
}
BELOW = {"docs/architecture": ("numbers", "flow", "failure", "threads", "security", "quorum")}
ELSEWHERE = [page for part in PARTS.values() for page in part if not page.startswith("docs/")]
include_patterns = ["docs/**.md", "docs/**.rst", *(f"{page}.md" for page in ELSEWHERE)]
exclude_patterns = [".*", "build", "dist", "**/__pycache__"]


def add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add a page's part of the table of contents, which is shown beside the text, to its source."""
    if page == root_doc:
        for caption, pages in PARTS.items():
            entries = [f"{title} </{below}>" for below, title in pages.items()]
            source[0] += _contents(entries, caption)
    elif page in BELOW:
        source[0] += _contents([f"/{page}/{below}" for below in BELOW[page]])


def _contents(entries: list[str], caption: str | None = None) -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, *entries, "```", ""])


# -- Markdown

myst_heading_anchors = 4  # as code hosts make them


def unlink_folders(app: Sphinx, page: nodes.document) -> None:
    """Leave the text of links to folders: the site has files, and a code host lists them."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(page.findall(pending_xref)):
        if link["reftype"] == "myst" and here.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)


# -- docstrings

# Their adapters are documented wherever the site is built, whatever is installed there.
autodoc_mock_imports = [
    "jax",
    "keras",
    "lightning",
    "lightning_fabric",
    "mlx",
    "pytorch_lightning",
    "tensorflow",
    "torchft",
    "transformers",
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
add_module_names = False
default_role = "py:obj"  # names in docstrings are links if the reference has them
maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_use_rtype = False


def prepare_docstring(_app: Sphinx, kind: str, *given: Any) -> None:
    """Mark indented blocks as code where no ``::`` does; keep colons of properties in sentences."""
    lines: list[str] = given[-1]
    for at in range(len(lines) - 1, 1, -1):
        text, gap, code = lines[at - 2 : at + 1]
        starts = code.startswith("    ") and not gap and text and not text.startswith(" ")
        if starts and not text.endswith("::"):
            lines[at - 1 : at] = ["", "::", ""]
    if kind in {"attribute", "property"}:
        lines.insert(0, "")  # napoleon takes a first line's words before a colon for a type


def as_written(given: type, name: str, *default: object) -> object:
    """Return an attribute of a class as its source has it, and not a mocked module's."""
    found = undecorate(safe_getattr(given, name, *default))
    mocked = getattr(found, "__qualname__", "").startswith("_MockObject.")
    return default[0] if mocked and default else found


# -- looks

html_theme = "furo"
html_title = project
html_favicon = "../reducer/monitoring/page/icon.svg"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]  # leads from the site's root to the first page
html_copy_source = False
html_show_copyright = False
highlight_language = "none"  # indented blocks are commands, and what they print
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("source-read", add_contents)
    app.connect("doctree-read", unlink_folders)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
    app.add_autodoc_attrgetter(type, as_written)
