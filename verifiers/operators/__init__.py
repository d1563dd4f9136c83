"""Code-edit operators that bugs, mutation scores and repair candidates share.

    for edit in edits(source, functions={"Queue.pop"}):
        print(edit.operator, edit.line, edit.before, "->", edit.after)

An edit changes one function by splicing its text; it always parses and always changes the syntax tree.
Most operators come in pairs or are their own inverse, so the repair of a bug that one of them made is
again an edit. Left out: edits over several places, new names, module-level code, decorators, annotations.
"""

from __future__ import annotations

from verifiers.operators.base import Edit, Operator
from verifiers.operators.generate import OPERATORS, edits, inverse
from verifiers.operators.prior import even_weights, operator_prior, window
from verifiers.operators.spans import FunctionSpan, functions

__all__ = [
    "OPERATORS",
    "Edit",
    "FunctionSpan",
    "Operator",
    "edits",
    "even_weights",
    "functions",
    "inverse",
    "operator_prior",
    "window",
]
