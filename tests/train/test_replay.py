"""The replayed verifier against real runs of the same drafter, prompts and seeds."""

import pytest

from foredraft import LLM, ForedraftError, Sampling
from foredraft.drafters.spec import DrafterSpec
from foredraft.train.replay import REGIMES, Recording, Replay, ReplayMetrics
from tests.support import tiny_models
from tests.support.method_cases import EACH_CASE, METHOD_CASES

PROMPTS = [[5, 9, 33, 7], [61, 3, 12], list(range(10, 50)), [4]]
TOKENS = 40
READERS_OF_REJECTED = ("lookahead", "token_recycling")  # what follows rejected tokens is not recorded


@pytest.fixture(scope="module")
def recordings():
    return {name: Recording.make(tiny_models.plain(), PROMPTS, t, TOKENS) for name, t in REGIMES.items()}


def real(llm, regime):
    samplings = [Sampling(max_tokens=TOKENS, temperature=REGIMES[regime], seed=i) for i in range(len(PROMPTS))]
    return [completion.stats for completion in llm.generate(PROMPTS, samplings)]


def counts(stats):
    return [(s.num_tokens, s.target_passes, s.num_drafts, s.num_drafted, s.num_accepted, s.accepted_at) for s in stats]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", [each for each in EACH_CASE if not each.values[0].startswith(READERS_OF_REJECTED)])
def test_a_replay_counts_what_a_real_run_counts(recordings, regime, name):
    # states traced text by text differ from those of the steps by rounding: nothing sits on a tie in float64
    def drafting():
        return tiny_models.plain().with_drafter(METHOD_CASES[name].make(4, tiny_models.plain()))

    replayed, run = Replay(drafting(), recordings[regime]).run(), real(drafting(), regime)
    assert counts(replayed) == counts(run)
    assert ReplayMetrics.from_stats(replayed) == ReplayMetrics.from_stats(run)
    assert ReplayMetrics.from_stats(run).acceptance_length > 1  # something was accepted


@pytest.mark.parametrize("name", READERS_OF_REJECTED)
def test_a_drafter_that_reads_the_target_after_rejected_tokens_is_refused(recordings, name):
    llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(4))
    with pytest.raises(ForedraftError, match="run it instead"):
        Replay(llm, recordings["greedy"])


def test_a_batch_smaller_than_the_prompts_is_replayed_in_turns(recordings):
    from foredraft.llm import MemoryLimits

    def llm():
        limits = MemoryLimits(max_batch=2, max_step_tokens=24)
        return LLM(tiny_models.target(), tiny_models.draft_model(4), limits=limits)

    assert counts(Replay(llm(), recordings["sampled"]).run()) == counts(real(llm(), "sampled"))


def test_a_drafter_that_fails_is_replayed_as_none(recordings):
    class Broken:
        spec = DrafterSpec(max_nodes=3)

        def propose(self, batch):
            raise RuntimeError("no")

        def observe(self, batch, commit):
            pass

        def forget(self, slots):
            pass

    figures = ReplayMetrics.from_stats(Replay(tiny_models.plain().with_drafter(Broken()), recordings["greedy"]).run())
    assert figures == ReplayMetrics(1.0, ())
