"""What operators compute for each point of their iteration space, against their references; and these spaces."""

from typing import Any

import numpy as np
import pytest
from operators import ROWS

from nntile_py.tasks import Contract, Op, Tensor
from nntile_py.tasks.op import CONTRACTION, operators
from nntile_py.tasks.scalar.evaluate import evaluate
from nntile_py.tasks.space import Space, space
from nntile_py.testing import SIZES, Case, error


def cases() -> dict[str, Any]:
    """Return the rows in which each operator has a scalar form."""
    found = {}
    for name, row in ROWS.items():
        case = Case(SIZES, "fp64")
        row(case)
        if all(op.scalar() for op in case.graph.ops):
            found[name] = row
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_scalar_forms_are_the_references(name: str) -> None:
    case = Case(SIZES, "fp64")
    CASES[name](case)
    values = case.computed(case.draw(np.random.default_rng(0)))
    for op in case.graph.ops:
        form = op.scalar()
        assert form
        seed = case.options.get("seed", 0)
        made = evaluate(form, [values[t] for t in op.inputs], [t.shape for t in op.outputs], seed)
        assert {out.number for out in form.outputs} == set(range(len(op.outputs)))
        for tensor, value in zip(op.outputs, made, strict=True):
            assert error(value, values[tensor]) < 1e-13, tensor


def test_which_operators_have_one() -> None:
    """Every operator has a scalar form, except contractions, moves and look-ups of rows, losses and optimizers."""
    made = {type(op) for row in CASES.values() for op in built(row)}
    names = {
        "Add", "Multiply", "BiasAdd", "Dropout", "Sum", "Activation", "ActivationGrad", "Gated", "GatedGrad",
        "Softmax", "SoftmaxGrad", "LayerNorm", "LayerNormGrad", "RMSNorm", "RMSNormGrad",
    }  # fmt: skip
    assert names <= {one.__name__ for one in made}
    known = operators().values()
    assert not [one for one in made if one.category is CONTRACTION] and made <= {*known}
    segments = Case(SIZES, "fp64")
    ROWS["Softmax segments"](segments)
    assert segments.graph.ops[0].scalar() is None


def built(row: Any) -> list[Op]:
    case = Case(SIZES, "fp64")
    row(case)
    return case.graph.ops


def test_spaces() -> None:
    def of(name: str) -> Space:
        return space(built(ROWS[name])[0])

    rows = {"batch": 4, "seq": 6}
    assert of("Contract bias") == Space({**rows, "ffn": 20, "embed": 24}, (("embed",),))
    assert of("Contract bias").independent == ("batch", "seq", "ffn")
    assert of("Contract weight gradient").reductions == (("batch", "seq"),)
    assert of("LayerNorm") == Space({**rows, "embed": 24}, (("embed",),))
    assert of("LayerNormGrad add bias").reductions == (("embed",), ("batch", "seq"))
    assert of("Sum") == Space({**rows, "embed": 24}, (("batch", "seq"),))
    assert [*of("Sum").sizes] == [*of("LayerNorm").sizes] != [*of("Activation relu").sizes]


def test_what_is_looked_up_is_not_summed() -> None:
    """Of each operator without a scalar form that computes nothing, or has a table; its gradient may sum."""
    looked_up = "Embedding|Gather|Rotary|Select|Unpack|AttentionRepeat|RelativeScores|Attention"
    kinds = {op.kind: op for row in ROWS.values() for op in built(row)}
    assert {kind for kind, op in kinds.items() if op.picks} >= set(looked_up.split("|"))
    for kind, op in kinds.items():
        taken = {axis for axes in space(op).reductions for axis in axes}
        assert not (kind in looked_up.split("|") and taken), (kind, taken)


def test_a_product_of_other_axes() -> None:
    a, b = Tensor("a", ["seq", "embed"], [3, 5], "fp32"), Tensor("b", ["key", "embed"], [4, 5], "fp32")
    product = Contract(a, b, Tensor("y", ["seq", "key"], [3, 4], "fp32"))
    assert space(product) == Space({"seq": 3, "key": 4, "embed": 5}, (("embed",),))
