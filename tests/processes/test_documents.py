"""The paths and tests that documents name exist, and the site shows what their comments say.

These tests start processes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_documents import DOCUMENTS, EXAMPLES, OTHERS, REPO, tracked


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_files_that_a_document_names_are_there(document: Path) -> None:
    """Whole paths, paths inside a package, and bare names."""
    named = set(re.findall(r"`([\w./-]+\.(?:py|sh|j2|toml))`", document.read_text(encoding="utf-8")))
    named = {name for name in named - EXAMPLES if not name.startswith(OTHERS) and "<" not in name}
    files = tracked()
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)] == []
