"""Settings that cannot act on a dump of another framework are refused, and noted in a preset."""

import pytest

from gspo.cli.replay import check_dump_settings
from gspo.cli.replay_settings import changed, of_header
from gspo.data.step_record import Header
from refusals import refuses

HEADER = Header(step=1)


def notes(*words: str, keeps_advantages: bool) -> list[str]:
    settings, _ = changed(of_header(HEADER, trust=False), words, complete=False)
    return check_dump_settings(settings, words, keeps_advantages)


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("reward.clip=1", "reward.clip", "1"),
        ("kl=reward", "kl", "reward"),
    ],
)
def test_with_the_dumps_advantages_no_reward_is_read(word, key, value):
    with refuses(key, value, "the advantages of the dump are kept"):
        notes("objective=gspo", word, keeps_advantages=True)


@pytest.mark.parametrize("keeps_advantages", [False, True])
@pytest.mark.parametrize("word", ["reward.overlong_cache=50", "trainer.mask_truncated=true"])
def test_a_dump_does_not_tell_which_responses_were_truncated(word, keeps_advantages):
    with refuses(word.partition("=")[0], problem="does not tell which responses were truncated"):
        notes("objective=gspo", word, keeps_advantages=keeps_advantages)


@pytest.mark.slow
def test_what_acts_is_accepted_and_a_presets_other_settings_are_noted():
    assert notes("objective=gspo", keeps_advantages=True) == []
    assert notes("advantage=rloo", "reward.clip=1", keeps_advantages=False) == []
    (note,) = notes("preset=drgrpo", keeps_advantages=True)
    assert note.startswith("the preset also sets advantage: the advantages of the dump are kept")
