"""Settings of Sphinx for the site that ``scripts/docs`` builds from the Markdown of the repository.

Pages keep their places and contain no syntax of the site: the navigation is added here. Not for the
choice of Sphinx: see decision 0043.
"""

from sphinx.application import Sphinx

project = "Steelyard"
author = "The Steelyard developers"
project_copyright = f"{author}, Apache License 2.0"
extensions = ["myst_parser"]

# The source folder of the build is the root of the repository, so that links between README and
# docs/ are the same on the site as on a code host.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "benchmarks", "build", "dist", "examples", "scripts", "src", "tests"]
source_suffix = {".md": "markdown"}

# The anchors of headings, as code hosts make them.
myst_heading_anchors = 6
# A JSON or Python block that leaves a part out with "..." is shown without colours.
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "none"

html_theme = "furo"
html_title = "Steelyard"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

# Caption, pages in order. "*" stands for the pages of a folder.
NAVIGATION = {
    "Use": (
        "docs/quickstart",
        "docs/fit",
        "docs/reading-a-plan",
        "docs/how-it-works",
        "docs/python-api",
        "docs/loops",
        "docs/command-line",
        "docs/export",
        "docs/hooks",
        "docs/models",
        "docs/torch-versions",
    ),
    "Several hosts and clusters": (
        "docs/hosts",
        "docs/clusters",
        "docs/cluster-files",
        "docs/cluster-presets",
        "docs/security",
    ),
    "Trades": ("docs/trades/*",),
    "Figures": ("docs/benchmarks", "docs/log"),
    "Development": (
        "docs/architecture",
        "docs/extend/a-new-trade",
        "docs/glossary",
        "docs/decisions/README",
        "CONTRIBUTING",
        "STYLE",
        "CHANGELOG",
    ),
}
# Pages that fold out below another.
BELOW = {"docs/benchmarks": ("docs/benchmarks/*",), "docs/decisions/README": ("docs/decisions/0*",)}


def _toctree(pages: tuple[str, ...], caption: str = "") -> str:
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{page}" for page in pages), "```", ""])


def _add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += "".join(_toctree(pages, caption) for caption, pages in NAVIGATION.items())
    elif page in BELOW:
        source[0] += _toctree(BELOW[page])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_navigation)
