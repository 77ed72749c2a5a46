"""Images with wrong predictions: each with its own image and path, or a sentence if none."""

from tests.support.reports import answered, noise

from engram.report.contents import Mistakes, Text
from engram.report.findings.mistakes import mistake, mistakes_subsection


def test_a_mistake_shows_the_sample_of_its_row() -> None:
    model, answers = answered(noise(4, ("a", "b")))
    first, last = (
        mistake(model, answers, row, "an image", predicted=["b"], true=["a"], confidence="90%")
        for row in (0, 3)
    )
    names = [answers.dataset.sample_name(int(answers.samples[row])) for row in (0, 3)]
    assert [first.path, last.path] == names
    assert first.image != last.image
    assert (list(first.predicted), list(first.true), first.confidence) == (["b"], ["a"], "90%")


def test_without_mistakes_there_is_a_sentence() -> None:
    model, answers = answered(noise(2, ("a", "b")))
    none = mistakes_subsection(answers, [], "the worst")
    assert none.contents == [Text("There are none.")]
    one = mistake(model, answers, 0, "an image", predicted=["b"], true=["a"])
    some = mistakes_subsection(answers, [one], "the worst")
    assert some.contents == [Mistakes([one], "the worst")]
    assert some.key == none.key == "mistakes-t"
