"""What flags say about recipes, data and names."""

import pytest

from engram import EngramError
from engram.cli import main as cli
from engram.cli.options import recipe_from
from engram.train.recipe import RECIPES


def test_an_unknown_recipe_is_a_sentence() -> None:
    with pytest.raises(
        EngramError, match="There is no recipe 'best'; choose one of default, paper"
    ):
        recipe_from("best", {})


def test_flags_change_the_named_recipe_and_nothing_else() -> None:
    recipe = recipe_from("paper", {"steps": 10, "lr": None, "batch": None})
    assert recipe == RECIPES["paper"].but(steps=10)
    assert recipe_from("paper", {"epochs": 5}).steps == 0  # else its 20,000 would count
    assert recipe_from("paper", {"epochs": 5, "steps": 7}).steps == 7


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kind", "poetry"], "There is no kind of task 'poetry'"),
        (["--kind", "regression", "--ignore", "3"], "--ignore is about masks, and regression has"),
        (["--classes", "a=1,b=2"], "--classes with = is about masks, and classification has none"),
        (["--kind", "segmentation", "--classes", "a=1,b"], "give every class the value"),
    ],
)
def test_flags_that_make_no_sense_are_a_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "digits", "--task", "t", "-o", "t.safetensors", *flags]) == 2
    assert sentence in capsys.readouterr().err
