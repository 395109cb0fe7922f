"""The quick reader of YAML reads what the strict one reads, and refuses what that one refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.cli.files import plan_file
from unicron.cli.files.job_file import read_yaml
from unicron.cli.files.plan_file import read_large
from unicron.events.errors import SpecError

PLAIN = ["1e-3", "1.5", ".5", "1.", "-3", "010", "6.02e23", "true", "False", "null", "~", "", "no",
         "on", "2026-01-01", "1:30", "'1e-3'", "'true'", '"7"', "0x10", "1_000", ".inf", "-.INF",
         "+7", "1e400", "&x 3", "!!str 3", "!!int '3'", "<<", "|\n  text\n", ">-\n  a\n  b"]
WRONG = ["a: 1\na: 2", "a: {b: 1, b: 2}", "{1: 2, 1: 3}", "{1: 2, 1.0: 3}", "a: &x 1\nb: *x",
         "a: [1", "? [1]\n: 2", "? {a: 1}\n: 2", "a: !!python/object:os.system x", "\ta: 1",
         "a: 1\n---\nb: 2", "[" * 3000, "a: 99999999999999999999999", "a: \x00", "a: b: c",
         "? !!set {a}\n: 1", "&a [*a]", "%YAML 3.0\n---\na"]

keys = st.integers(-10, 10**18) | st.text(max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-10**18, 10**18) | st.text(max_size=6)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20)


def said(read: Callable[[str], object], text: str) -> str:
    """What is read, in which 1 is neither 1.0 nor true, or in which words it is refused."""
    try:
        return repr(read(text))
    except SpecError as error:
        return f"{error}: {error.hint}"


@pytest.mark.parametrize("scalar", PLAIN)
@pytest.mark.parametrize("around", ["a: {}", "{}", "- {}\n- 2", "{}: 1"])
def test_scalars_are_read_alike(scalar: str, around: str) -> None:
    text = around.replace("{}", scalar)
    assert said(read_large, text) == said(read_yaml, text)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_refused_is_refused_with_the_same_words(text: str) -> None:
    with pytest.raises(SpecError):
        read_large(text)
    assert said(read_large, text) == said(read_yaml, text)


@given(values, st.booleans())
@settings(max_examples=200, deadline=None)
def test_documents_are_read_alike(value: object, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert said(read_large, text) == said(read_yaml, text)


def test_plain_data_needs_the_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is not quick: the strict reader is there for what is doubtful."""
    if plan_file.LOADER is None:
        pytest.skip("this PyYAML is without libyaml")
    monkeypatch.delattr(plan_file, "read_yaml")
    assert read_large("a: {8: 1.0e15}\nb: [x, 'y', -2, null, true]\n") == {
        "a": {8: 1.0e15}, "b": ["x", "y", -2, None, True]}
    assert read_large("") is None


def test_without_libyaml_it_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "LOADER", None)
    assert read_large("a: {8: 1.0e15}") == {"a": {8: 1.0e15}}
