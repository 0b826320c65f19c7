"""The record of one optimizer's steps: totals, streaks, and outcomes that are read no earlier than asked for."""

from typing import Any

import pytest
import torch

from lightning_amp.outcomes import Outcome, OutcomeRecord

STEPPED, SKIPPED, IDLE = Outcome.STEPPED, Outcome.SKIPPED, Outcome.IDLE


def record(*outcomes: Outcome) -> OutcomeRecord:
    it = OutcomeRecord()
    for outcome in outcomes:
        it.add(outcome)
    return it


def flag(outcome: Outcome) -> torch.Tensor:
    """What the device knows of an outcome."""
    return torch.tensor(float(outcome is SKIPPED))


def test_outcomes_are_the_words_of_the_contract() -> None:
    assert [o.value for o in Outcome] == ["stepped", "skipped", "idle"]
    assert record().latest is None
    assert record().known_streak == (None, 0)


@pytest.mark.parametrize(
    ("outcomes", "streak"),
    [([STEPPED], 1), ([SKIPPED] * 3, 3), ([SKIPPED, STEPPED, STEPPED], 2), ([IDLE, IDLE, SKIPPED], 1)],
)
def test_totals_latest_and_streak_follow_every_outcome(outcomes: list[Outcome], streak: int) -> None:
    it = record(*outcomes)
    assert it.counts == {o: outcomes.count(o) for o in Outcome}
    assert it.latest is outcomes[-1]
    assert it.known_streak == (outcomes[-1], streak)
    assert it.progress == (len(outcomes), outcomes.count(STEPPED))


@pytest.mark.parametrize("ask", ["latest", "counts", "state_dict", "settle", "add", "defer"])
@pytest.mark.parametrize("outcome", [STEPPED, SKIPPED])
def test_a_deferred_outcome_is_read_when_asked_for_or_when_the_next_arrives(outcome: Outcome, ask: str) -> None:
    it = record(IDLE)
    it.defer(flag(outcome))
    assert it.known_streak == (IDLE, 1), "not read yet"
    assert it.progress == (2, 1), "taken for a move until it is known not to be one"
    if ask in ("add", "defer"):
        it.add(IDLE) if ask == "add" else it.defer(flag(outcome))
        assert it.counts[outcome] == 1 + (ask == "defer")
        assert it.latest is (IDLE if ask == "add" else outcome), "in the order they came"
    else:
        attribute: Any = getattr(it, ask)
        if callable(attribute):
            attribute()
        assert it.known_streak == (outcome, 1)
        assert it.progress == (2, int(outcome is STEPPED))


def test_a_deferred_outcome_is_read_once() -> None:
    it = record()
    it.defer(flag(SKIPPED))
    assert (it.latest, it.latest) == (SKIPPED, SKIPPED)
    assert it.counts == {STEPPED: 0, SKIPPED: 1, IDLE: 0}


def test_counts_are_a_copy() -> None:
    it = record(STEPPED)
    it.counts[STEPPED] = 7
    assert it.counts[STEPPED] == 1


@pytest.mark.parametrize("outcomes", [[], [STEPPED], [STEPPED, SKIPPED, SKIPPED], [IDLE]])
def test_c71_a_saved_record_goes_on_as_if_nothing_had_been(outcomes: list[Outcome]) -> None:
    through, saved = record(*outcomes), record()
    saved.load_state_dict(record(*outcomes).state_dict())
    for it in (through, saved):
        it.add(SKIPPED)
    assert saved.state_dict() == through.state_dict()
    assert saved.known_streak == through.known_streak
    assert all(value is None or type(value) in (int, str) for value in saved.state_dict().values())


def test_totals_alone_can_be_loaded_and_drop_what_was_deferred() -> None:
    it = record(STEPPED)
    it.defer(flag(SKIPPED))
    it.load_state_dict({"stepped": 5, "skipped": 2, "idle": 1})
    assert it.counts == {STEPPED: 5, SKIPPED: 2, IDLE: 1}
    assert it.latest is None
    assert it.progress == (2, 1), "of this object's own calls"
