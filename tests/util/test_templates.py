"""Templates: what is inserted is escaped, and a misspelt name is an error."""

from pathlib import Path

import jinja2
import pytest

from engram.util.templates import render


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one template."""
    (tmp_path / "letters" / "templates").mkdir(parents=True)
    (tmp_path / "letters" / "__init__.py").touch()
    template = '{% if name %}\n<p title="{{ name }}">{{ name }}</p>\n{% endif %}'
    (tmp_path / "letters" / "templates" / "letter.txt").write_text(template)
    monkeypatch.syspath_prepend(tmp_path)
    return "letters"


def test_values_are_escaped_whatever_the_name_of_the_template(package: str) -> None:
    html = render(package, "letter.txt", name='<b>"&')
    assert html == '<p title="&lt;b&gt;&#34;&amp;">&lt;b&gt;&#34;&amp;</p>\n'


def test_a_name_that_is_missing_is_an_error(package: str) -> None:
    with pytest.raises(jinja2.UndefinedError, match="name"):
        render(package, "letter.txt", nmae="x")
