import pytest

from envfactory.prune import prune, test_name, test_path, test_source

SOURCE = '''\
"""Tests of a thing."""
import pytest

TABLE = [1, 2]  # the table


def helper():
    return 1


@pytest.fixture
def thing():
    yield helper()


# says why
@pytest.mark.parametrize("x", TABLE)
def test_one(x, thing):
    assert x


def test_two():
    secret = 2


class Base:
    def setup_method(self):
        self.x = 1

    def test_inherited(self):
        assert self.x

    def test_hidden(self):
        secret = 3


class TestSub(Base):
    y = 2

    def test_own(self):
        secret = 4


class TestOther:
    def test_far(self):
        secret = 5


class Plain:
    def value(self):
        return 1
'''


def test_ids_are_split_at_the_first_bracket_and_colons() -> None:
    test_id = "tests/test a.py::TestA::test_b[x::y[1] - z]"
    assert (test_path(test_id), test_name(test_id)) == ("tests/test a.py", "TestA::test_b")


def test_only_the_kept_test_stays_with_its_comment_and_helpers() -> None:
    text = prune(SOURCE, {"test_one"})
    assert "# says why\n@pytest.mark.parametrize" in text
    assert "secret" not in text
    assert "test_two" not in text
    for part in ('"""Tests of a thing."""', "# the table", "def helper", "def thing", "class Plain"):
        assert part in text
    compile(text, "pruned", "exec")


def test_an_inherited_test_keeps_its_base_and_nothing_else_of_it() -> None:
    text = prune(SOURCE, {"TestSub::test_inherited"})
    assert "def test_inherited" in text
    assert "def setup_method" in text
    assert "class TestSub(Base)" in text
    assert "secret" not in text
    assert "TestOther" not in text


def test_a_class_whose_tests_all_go_but_which_is_kept_stays_a_class() -> None:
    second = "class TestB(A):\n    def test_y(self):\n        pass\n"
    source = "class A:\n    def test_x(self):\n        pass\n\n\n" + second
    assert prune(source, {"TestB::test_y"}) == ("class A:\n    pass\n\n\n" + second)


def test_keeping_everything_changes_nothing() -> None:
    names = {"test_one", "test_two", "Base::test_inherited", "Base::test_hidden", "TestSub::test_own"}
    assert prune(SOURCE, names | {"TestOther::test_far"}) == SOURCE


@pytest.mark.parametrize(
    ("name", "first"),
    [("TestOther::test_far", "def test_far"), ("test_two", "def test_two"), ("test_none", "")],
)
def test_source_of_one_test(name: str, first: str) -> None:
    text = test_source(SOURCE, name)
    assert text.strip().startswith(first)
    assert bool(text) is bool(first)
