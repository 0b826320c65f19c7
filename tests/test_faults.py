"""The table of docs/faults.md, at the levels with a scale."""

import pytest

from benchmarks.faults import FAULTS, LEVELS, judge


@pytest.mark.filterwarnings("ignore:Batch 3")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_c34_c40_a_faulty_batch_leaves_weights_and_states_as_if_it_had_not_been(fault, level):
    spoils = fault in ("NaN in the batch", "infinity in the batch")
    assert judge(FAULTS[fault], LEVELS[level], restore=False) == f"equal, {'spoilt' if spoils else 'moved'}"


@pytest.mark.filterwarnings("ignore:Batch 3")
@pytest.mark.parametrize("fault", ["infinite loss", "NaN in the batch"])
def test_c40_buffers_are_given_back_where_the_user_asks(fault):
    assert judge(FAULTS[fault], LEVELS["O2"], restore=True) == "equal, clean"
