"""Text environments with Gymnasium's interface: one's own, and those of the package."""

import sys
from contextlib import suppress
from unittest.mock import ANY

import pytest

from gspo.tasks.adapters.seeded_games import CannotBegin
from gspo.tasks.adapters.text_games import TextGames
from refusals import refuses
from text_games import Doors

LAKE = {
    "id": "FrozenLake-v1",
    "arguments": {"render_mode": "ansi", "is_slippery": False},
    "shows": "render",
    "actions": ["left", "down", "right", "up"],
}


def begun(task: TextGames, index: int = 0):
    """The game of training problem `index`, begun, and what the policy reads first."""
    problem = task.problem(1, "train", index)
    game = task.environment(problem, (1, 2))
    (message,) = game.reset(problem)
    assert message == {"role": "user", "content": problem.prompt}
    return game, problem


def way(problem) -> int:
    return Doors().reset(problem.answer)[1]["way"]


def test_a_game_by_hand():
    task = TextGames(env="text_games:Doors", instruction="Find the way out.")
    game, problem = begun(task)
    assert problem.prompt == "Find the way out.\n\nThere are 4 doors."
    wrong = game.step(str(way(problem) % 4 + 1))
    assert (wrong.observation, round(wrong.reward, 6), wrong.done) == ("A wall.", -0.1, False)
    out = game.step(f" {way(problem)}\n")
    assert (out.reward, out.done, out.verdict, out.measures) == (
        1.0,
        True,
        "terminated",
        {"invalid_actions": 0.0},
    )
    game.close()


def test_a_game_whose_time_is_up_says_so():
    game, _ = begun(TextGames(env="text_games:Doors"))
    outcomes = [game.step("5") for _ in range(3)]
    assert [o.done for o in outcomes] == [False, False, True] and outcomes[
        -1
    ].verdict == "time-limit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("raises", "did not begin: OSError: the game server answered 503"),
        ("hangs", "did not begin: the environment took longer than step_seconds=0.5"),
        ("reset", "did not begin: ValueError: reset returned 'seen', not (observation, info)"),
    ],
)
def test_a_game_that_cannot_begin_is_said_in_a_line(what, problem):
    task = TextGames(env="text_games:Odd", arguments={"what": what}, step_seconds=0.5)
    with pytest.raises(CannotBegin) as caught:
        task.problem(1, "train", 0)
    assert caught.value.key == "task.env" and problem in caught.value.problem


def test_a_later_game_that_cannot_begin_ends_no_run():
    task = TextGames(env="text_games:Odd", arguments={"what": "sometimes"})
    begun = []  # indices of games; until one has begun, a failure is an error
    for i in range(8):
        with suppress(CannotBegin):
            task.problem(1, "train", i)
            begun.append(i)
    prompts = [task.problem(1, "train", i).prompt for i in range(8)]
    assert begun
    assert {prompt[:13] for prompt in prompts} == {"There are 4 d", "(no beginning"}


def test_half_a_surrogate_pair_in_a_beginning_is_a_question_mark():
    task = TextGames(env="text_games:Odd", arguments={"what": "surrogate"})
    assert task.problem(1, "train", 0).prompt == "1-? 5"


def test_problems_are_seeds_by_position():
    task, again = (
        TextGames(env="text_games:Doors"),
        TextGames(env="text_games:Doors", evaluation_size=7),
    )
    seeds = [task.problem(1, "train", i).answer for i in range(50)]
    assert (
        seeds == [again.problem(1, "train", i).answer for i in range(50)] and len(set(seeds)) == 50
    )
    held = [task.problem(1, "text_game", i).answer for i in range(50)]
    assert not set(seeds) & set(held) and seeds != [
        task.problem(2, "train", i).answer for i in range(50)
    ]
    assert (task.size("train"), task.size("text_game"), again.size("text_game")) == (None, 100, 7)
    assert {way(task.problem(1, "train", i)) for i in range(50)} == {1, 2, 3, 4}


def test_all_samples_of_a_problem_play_the_same_game():
    task = TextGames(env="text_games:Doors")
    problem = task.problem(1, "train", 3)
    for sample in range(3):
        game = task.environment(problem, (1, "rollout", sample))
        game.reset(problem)
        assert game.step(str(way(problem))).reward == 1.0


def test_the_action_stands_between_tags():
    game, problem = begun(TextGames(env="text_games:Doors", form="tags"))
    none = game.step(str(way(problem)))
    assert none.observation == "Invalid action: write it between <action> and </action>."
    assert (none.reward, none.done, none.measures) == (0.0, False, {"invalid_actions": 1.0})
    last = f"Not <action>7</action>, <action>8 but <action> {way(problem)}\n</action>!"
    assert game.step(last).reward == 1.0


def test_arrays_and_mappings_are_shown_as_json():
    _, problem = begun(TextGames(env="text_games:Numbers"))
    assert problem.prompt == '{"grid": [[0, 1], [2, 3]], "at": [1, 2.5], "name": "A", "seen": true}'


@pytest.mark.parametrize(
    "settings, refusal",
    [
        ({}, ("task.env", "", "give one of them")),
        (
            {"env": "text_games:Doors", "id": "FrozenLake-v1"},
            ("task.env", "text_games:Doors", "give one of them"),
        ),
        (
            {"id": "text_games:Doors-v0"},
            ("task.id", "text_games:Doors-v0", "to import text_games set"),
        ),
        (
            {"env": "text_games:Doors", "shows": "ansi"},
            ("task.shows", "ansi"),
        ),
        (
            {"env": "text_games:Doors", "form": "tag"},
            ("task.form", "tag"),
        ),
        (
            {"env": "text_games:Doors", "actions": ["a", "A"]},
            ("task.actions", ["a", "A"], "two of them have one name"),
        ),
        ({"env": "text_games:Doors", "evaluation_size": 0}, ("task.evaluation_size", 0)),
    ],
)
def test_bad_settings_are_refused_by_name(settings, refusal):
    with refuses(*refusal):
        TextGames(**settings)


@pytest.mark.parametrize(
    "settings, refusal",
    [
        (
            {"env": "text_games:Door"},
            ("task.env", "text_games:Door", "the nearest is Doors"),
        ),
        (
            {"env": "text_games:Doors", "arguments": {"door": 3}},
            ("task.arguments", {"door": 3}, "does not fit"),
        ),
        (
            {"env": "text_games:Doors", "actions": ["a"]},
            ("task.actions", ["a"], "the environment has 0 numbered"),
        ),
    ],
)
def test_settings_that_do_not_fit_the_environment_are_refused(settings, refusal):
    with refuses(*refusal):
        TextGames(**settings).problem(1, "train", 0)


@pytest.mark.parametrize(
    "what, text",
    [("reset", "reset returned 'seen', not "), ("object", "of the type object cannot be shown")],
)
def test_what_does_not_keep_to_the_interface_is_refused(what, text):
    with pytest.raises(ValueError, match=text):
        TextGames(env="text_games:Odd", arguments={"what": what}).problem(1, "train", 0)


def test_a_step_of_the_older_interface_is_refused():
    game, _ = begun(TextGames(env="text_games:Odd", arguments={"what": "step"}))
    with pytest.raises(
        ValueError,
        match=r"step returned .* not \(observation, reward, terminated, truncated, info\)",
    ):
        game.step("1")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with refuses("task.id", "FrozenLake-v1", 'pip install -e ".[gymnasium]"'):
        TextGames(id="FrozenLake-v1").problem(1, "train", 0)


# --- environments of the package


def test_a_lake_is_crossed_by_names_and_numbers():
    game, problem = begun(TextGames(**LAKE))
    assert problem.prompt == "[S]FFF\nFHFH\nFFFH\nHFFG"
    seen = [game.step(action) for action in ("down", " DOWN", "fly", "2", "1", "right", "right")]
    assert seen[0].observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert seen[2].observation == "Invalid action: the actions are left, down, right, up."
    assert [o.measures["invalid_actions"] for o in seen] == [0, 0, 1, 0, 0, 0, 0]
    assert (seen[-1].reward, seen[-1].done, seen[-1].verdict) == (1.0, True, "terminated")
    assert not any(o.done for o in seen[:-1])


@pytest.mark.parametrize("action", ["4", "-1", "1.0", "one", "", "1 1", "９", "1" * 30])
def test_what_is_no_number_of_an_action_is_told(action):
    game, _ = begun(TextGames(id="Blackjack-v1"))
    assert (
        game.step(action).observation
        == "Invalid action: the actions are a whole number from 0 to 1."
    )


def test_a_text_space_takes_its_texts_alone():
    from gymnasium.spaces import Text

    game, _ = begun(TextGames(env="text_games:Doors"))
    game.space = Text(max_length=2, charset="1234")
    assert game.step("5").measures == {"invalid_actions": 1.0} and game.step("1").measures == {
        "invalid_actions": 0.0
    }


@pytest.mark.parametrize(
    "settings, refusal",
    [
        ({"id": "FrozenLake-v77"}, ("task.id", "FrozenLake-v77", "gymnasium knows no such")),
        ({"id": "Pendulum-v1"}, ("task", ANY, "here they can be texts, or numbers")),
        (
            LAKE | {"actions": ["left"]},
            ("task.actions", ["left"], "the environment has 4 numbered"),
        ),
        (LAKE | {"arguments": {}}, ("task.shows", "render", "render() returned NoneType, not a")),
    ],
)
def test_environments_of_the_package_that_cannot_be_used_are_refused(settings, refusal):
    with refuses(*refusal):
        TextGames(**settings).problem(1, "train", 0)
