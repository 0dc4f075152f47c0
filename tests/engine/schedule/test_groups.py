"""Samples of one prompt, which share its pages. Driven by the toy model.

Covers engine/schedule/groups.py.
"""

import pytest

from engine.errors import QueueFull
from engine.outputs import FinishReason
from tests.engine.driver import Driver, output_of
from tests.engine.toy import reference


@pytest.mark.parametrize("length", [1, 4, 5, 6, 40])
def test_samples_share_a_prompt_and_copy_its_last_page(run_ahead, length):
    driver = Driver.of(run_ahead=run_ahead, token_budget=16)
    prompt = list(range(length))
    samples = driver.add_group(prompt, 3, max_tokens=15, ignore_eos=True)
    driver.run()
    for sample in samples:
        assert output_of(sample) == reference(prompt, 15, ignore_eos=True, seed=sample.seed)
    assert driver.num_prefilled == length + 2, "the followers compute one token each"
    copies = [copy for plan in driver.plans for copy in plan.page_copies]
    assert len(copies) == (2 if (length - 1) % 4 else 0)


def test_samples_start_one_step_after_the_prompt_is_scheduled(run_ahead):
    driver = Driver.of(run_ahead=run_ahead, token_budget=16)
    driver.add_group(list(range(24)), 3, max_tokens=5, ignore_eos=True)
    driver.run()
    assert [len(plan.token_ids) for plan in driver.plans[:4]] == [1, 1, 2, 0]
    assert driver.plans[3].num_decode_rows == 3


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_samples_run_without_their_leader(run_ahead, when):
    driver = Driver.of(run_ahead=run_ahead, token_budget=8, with_prefix_cache=False)
    prompt = list(range(20))
    leader, *followers = driver.add_group(prompt, 3, max_tokens=5, ignore_eos=True)
    for _ in range(when):
        driver.step()
    driver.scheduler.mark(leader.id, FinishReason.ABORT)
    driver.run()
    assert leader.finish_reason is FinishReason.ABORT
    for follower in followers:
        assert output_of(follower) == reference(prompt, 5, ignore_eos=True, seed=follower.seed)


def test_samples_fail_with_the_step_that_computes_their_prompt():
    driver = Driver.of(run_ahead=1)
    samples = driver.add_group(list(range(10)), 3, max_tokens=5)
    driver.launch(fails=True)
    driver.launch()
    driver.commit()
    assert driver.finished == samples
    driver.run()
    assert all(sample.finish_reason is FinishReason.ERROR for sample in samples)


def test_a_group_is_queued_or_refused_as_a_whole():
    driver = Driver.of(max_num_seqs=1, max_waiting=3)
    driver.add_group([1, 2], 3)
    with pytest.raises(QueueFull):
        driver.add_group([1, 2], 2)
    assert driver.scheduler.num_waiting == 3
    driver.run()
