"""What a release needs beside a wheel that installs: one version everywhere, and a workflow that
holds no secret.
"""

import re
from pathlib import Path

import yaml

import sinklab

ROOT = Path(__file__).parents[1]


def test_the_citation_has_the_version_and_the_papers_of_the_metadata():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == sinklab.__version__ and cited["license"] == "MIT"
    for paper in cited["references"]:
        assert paper["url"] in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## \[(.+?)\] – (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert first is not None and first[1] == sinklab.__version__.partition(".dev")[0]
    assert (first[2] == "unreleased") == (".dev" in sinklab.__version__)


def test_a_tag_is_published_by_trust_and_after_its_checks():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"] == {
        "id-token": "write"
    }
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(one.startswith(("actions/", "pypa/")) for one in used)
    assert "secrets" not in text and "password" not in text and not re.search(r"https?://", text)
    checks = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert (
        "twine check --strict" in checks and "CITATION.cff" in checks and "CHANGELOG.md" in checks
    )
