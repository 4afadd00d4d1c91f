"""The arena's cells and contenders compose in the order in which its sweep combines them."""

import pytest
import yaml

from commands import ROOT
from composing import CONF, settings
from daily import daily_but
from gspo.config.checks import check

SWEEPS = ROOT / "sweeps"
CELLS = [path.stem for path in sorted(SWEEPS.glob("cell/*.yaml"))]
STALE = ("sums_stale", "mixed_stale", "tools_stale")
STEP_START = ("m2po", "dppo", "prime_rl")  # whose old policy is that of the batch's start


def params(sweep: str) -> dict[str, str]:
    content = yaml.safe_load((SWEEPS / f"{sweep}.yaml").read_text(encoding="utf-8"))
    return content["hydra"]["sweeper"]["params"]


def checked(sweep: str, **choices: str):
    """The settings of a job: Hydra adds the files in the order of the sweep's parameters."""
    keys = [key.removeprefix("+") for key in params(sweep)]
    overrides = [f"+{key}={choices[key]}" for key in keys if key in choices]
    assert len(overrides) == len(choices)
    search = f"hydra.searchpath=[file://{CONF}]"
    result = settings(search, *overrides, name=sweep, folder=SWEEPS)
    check(result)
    return result


@pytest.mark.parametrize(
    ("cell", "contender"), [("sums_stale", name) for name in (*STEP_START, "gspo")]
)
def test_a_contender_has_its_own_old_policy_where_responses_are_old(cell, contender):
    result = checked("arena", cell=cell, contender=contender)
    expected = "step_start" if contender in STEP_START else "behaviour"
    assert result.policy.old_logprobs == expected
    assert result.rollout.staleness == 4


@pytest.mark.slow
@pytest.mark.parametrize("cell", daily_but(CELLS, "sums_stale", "tools_stale"))
def test_every_contender_fits_every_cell(cell):
    contenders = params("arena")["+contender"].split(",")
    if cell in STALE:
        contenders.append("m2po")
    if cell.startswith("tools"):
        contenders.append("gspo_token")
    for contender in contenders:
        result = checked("arena", cell=cell, contender=contender)
        assert result.study == f"arena_{cell}"


@pytest.mark.parametrize("contender", ["dppo", "gspo"])
def test_the_engines_log_probs_fit_contenders_without_an_old_policy(contender):
    result = checked("arena_bfloat16", rounding="engine", contender=contender)
    assert result.policy.old_logprobs == ("step_start" if contender == "dppo" else "engine")


def test_the_sweeps_name_every_contender_that_all_cells_have():
    files = {path.stem for path in (SWEEPS / "contender").glob("*.yaml")}
    for sweep in ("arena", "arena_bfloat16"):
        assert set(params(sweep)["+contender"].split(",")) == files - {"m2po", "gspo_token"}
