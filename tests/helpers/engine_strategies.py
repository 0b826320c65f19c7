"""What the stateful test draws: trainings, losses and passes."""

from typing import Any

import hypothesis.strategies as st

from tests.helpers.engine_optimizers import KINDS
from tests.helpers.engine_script import Loss, Pass, Setup, Term
from tests.helpers.engine_world import NETS, first_values

NAMES = tuple(first_values())

rarely = st.sampled_from([False, False, False, True])
places = st.integers(0, 2)
names = st.sampled_from(NAMES)
_pairs = st.tuples(*[st.sampled_from([1.0, -1.0, 2.0, -2.0])] * 2)
_terms = st.lists(
    st.builds(Term, st.integers(0, NETS - 1), _pairs, _pairs), min_size=1, max_size=3, unique_by=lambda term: term.net
)
_poisons = st.sampled_from([None] * 10 + ["x inf", "x nan", "dy", "dw", "loss * inf", "loss + nan"])
losses = st.builds(Loss, _terms.map(tuple), _poisons, rarely)
passes = st.lists(
    st.builds(
        Pass,
        how=st.sampled_from(["id 0", "id 1", "named", "named", "walk", "walk", "walk"]),
        delay=st.booleans(),
        first_weight_only=rarely,
        create_graph=rarely,
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def setups(draw: Any) -> Setup:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    return Setup(
        level=draw(st.sampled_from(["O0", "O1", "O2", "O2", "O3"])),
        loss_scale=draw(st.sampled_from(["dynamic", "dynamic", "dynamic", 128.0, 24.0, 1.0])),
        init_scale=2.0 ** draw(st.sampled_from([3, 10, 13, 15, 16])),
        growth_interval=draw(st.sampled_from([1, 2, 3, 2000])),
        growth_factor=draw(st.sampled_from([2.0, 4.0])),
        hysteresis=draw(st.sampled_from([1, 1, 2])),
        min_scale=draw(st.sampled_from([2.0**-14, 8.0])),
        max_scale=draw(st.sampled_from([2.0**17, 2.0**24])),
        kinds=tuple(kinds),
        owners=tuple(tuple(draw(st.lists(names, min_size=1, max_size=6, unique=True))) for _ in kinds),
        kept=draw(st.sampled_from([None, None, 1])),
        joint=draw(rarely),
        region=draw(st.booleans()),
        cache_casts=draw(st.sampled_from([True, True, False, "step"])),
    )
