"""Comparison of formats: its figures, its rows, and logits that do not depend on how a sequence is cut."""

import argparse
import math

import pytest
import torch

from benchmarks.formats import Format, all_formats, formats_of, table, with_all_columns
from benchmarks.logit_errors import Comparison, random_model, sequence_logits
from benchmarks.next_sentence.questions import TEXT, questions
from models.formats import CONVERSIONS
from models.shapes import SHAPES

CPU = torch.device("cpu")


def test_the_figures_of_a_comparison():
    exact = torch.tensor([[0.0, 3.0, 0.0], [4.0, 0.0, 0.0]])
    found = torch.tensor([[0.0, 3.0, 0.0], [4.0, 0.0, 5.0]])
    comparison = Comparison()
    comparison.add(found, exact, torch.tensor([0, 1]))
    assert comparison.error_percent == pytest.approx(100)
    assert comparison.agreed_percent == 50
    # The second token follows the first logits; nothing follows the last.
    assert comparison.perplexity == pytest.approx((math.exp(3) + 2) / math.exp(3))


def test_every_conversion_and_names_that_are_read_back():
    formats = all_formats()
    assert {one.weights for one in formats} >= {"16", *CONVERSIONS} - {"dense"}
    assert [one for each in formats for one in formats_of(each.name)] == formats
    with pytest.raises(argparse.ArgumentTypeError, match=r"no format is int4\+int5"):
        formats_of("int4+int5")


def test_a_format_that_fails_does_not_stop_the_others(capsys):
    def figures(one):
        if one.weights == "int4":
            raise ValueError("too odd\nfor a table")
        return {"error %": 1.0}

    rows = with_all_columns(table([Format(), Format("int4"), Format("int8")], figures))
    assert [row["error %"] for row in rows] == [1.0, "", 1.0]
    assert [row["failed"] for row in rows] == ["", "too odd", ""]
    assert "too odd" in capsys.readouterr().out


def test_logits_in_pieces_and_in_w8a8(monkeypatch):
    monkeypatch.setitem(CONVERSIONS, "w8a8", "benchmarks.formats:w8a8")
    tokens, spec = torch.arange(20), SHAPES["tiny"]
    exact = sequence_logits(random_model(spec, CPU, torch.float32, None), "auto", tokens, 20)
    model = random_model(spec, CPU, torch.float32, "w8a8")
    whole = Comparison()
    whole.add(sequence_logits(model, "auto", tokens, 20), exact, tokens)
    pieces = Comparison()
    pieces.add(sequence_logits(model, "auto", tokens, 7), exact, tokens)
    assert 0.1 < whole.error_percent < 10
    assert pieces.error_percent == pytest.approx(whole.error_percent, rel=0.05)


def test_questions_have_four_different_answers():
    found = questions(TEXT.read_text("utf-8"))
    assert all(len(set(one["choices"])) == 4 for one in found)
    text = " ".join(TEXT.read_text("utf-8").split())
    assert all(f"{one['text']} {one['choices'][one['label']]}" in text for one in found)
