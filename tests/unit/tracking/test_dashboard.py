"""W&B's views: every metric has its place, what is sent is what the registry says, and publishing
replaces.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import forked
import user_code
from gspo.analysis import sources
from gspo.tracking import dashboard, metrics, views
from gspo.tracking.metrics import METRICS, lookup
from gspo.tracking.views import LEFT_OUT, VIEWS, Panel, recorded
from recorded_runs import HEALTHY, write
from wandb_server import serving

ROOT = Path(__file__).parents[3]

PANELS = [panel for view in VIEWS for panel in view.panels()]
WITHOUT = {"WANDB_API_KEY": "", "NETRC": "/nonexistent", "WANDB_SILENT": "true"}


def call(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "gspo", "dashboard", *arguments]
    env = os.environ | WITHOUT | environment
    return forked.run(command, cwd=cwd, env=env)


def test_every_metric_is_on_a_panel_or_left_out_for_a_reason(monkeypatch):
    assert views.unplaced() == []
    registry = {metric.name for metric in METRICS}
    assert set(LEFT_OUT) <= registry and set(views.names_on_panels(VIEWS)) <= registry
    assert not set(LEFT_OUT) & {name for panel in PANELS for name in panel.metrics}
    monkeypatch.setattr(metrics, "METRICS", METRICS)
    monkeypatch.setattr(
        views, "METRICS", [*METRICS, metrics.Metric("optim/new", "1", "nobody has placed it")]
    )
    assert views.unplaced() == ["optim/new"]


def test_panels_say_what_the_registry_says_and_share_an_axis():
    for panel in PANELS:
        assert len({metric.unit for metric in panel.entries()}) == 1, panel.title()
        assert len(panel.metrics) == 1 or not any("*" in name for name in panel.metrics), (
            panel.title()
        )
    with pytest.raises(KeyError, match="reward/maen"):
        Panel(("reward/maen",)).entries()
    panel = Panel(("clip/token_active", "clip/token_outside"))
    assert panel.title() == "clip/token_active, token_outside" and panel.unit() == "share of tokens"
    assert Panel(("reward/mean",), x="compute/flops").title() == "reward/mean against compute/flops"
    first = "clip/token_active [share of tokens]: tokens whose gradient the clip removed (Fig 2 of the paper)"
    assert panel.description().splitlines()[0] == first


def test_no_panel_stands_twice():
    for by in {view.by for view in VIEWS}:
        drawn = [
            (name, p.x)
            for view in VIEWS
            if view.by == by
            for p in view.panels()
            for name in p.metrics
        ]
        assert len(drawn) == len(set(drawn))


def test_a_metric_of_its_own_is_not_its_familys():
    assert (
        lookup("reward/overlong_penalty").unit == "reward"
        and "soft overlong" in lookup("reward/overlong_penalty").meaning
    )
    assert lookup("reward/math").name == "reward/*"


def test_what_was_not_recorded_is_left_out_and_named():
    kept, missing = recorded(
        VIEWS, {"reward/mean", "compute/flops", "eval/rated/avg@2", "clip/token_active"}
    )
    assert [view.name for view in kept] == [
        "Stability",
        "Clipping",
        "Routing Replay",
        "Evaluation",
        "Efficiency",
    ]
    assert [panel.title() for panel in kept[1].panels()] == ["clip/token_active"]
    against = [
        "reward/mean against compute/flops",
        "eval/*/avg@* against compute/flops",
        "compute/flops",
    ]
    assert [panel.title() for panel in kept[4].panels()] == against
    assert {"policy/entropy", "compute/tokens", "eval/*/pass@*"} <= set(
        missing
    ) and "eval/*/avg@*" not in missing


@pytest.mark.parametrize(
    "metric", [metric for metric in METRICS if "*" in metric.name], ids=lambda metric: metric.name
)
def test_the_pattern_of_a_family_finds_its_members(metric):
    member = metric.name.replace("*", "7")
    assert re.fullmatch(dashboard.pattern(metric.name), member) and lookup(member) is metric
    others = [each.name for each in METRICS if re.search(dashboard.pattern(metric.name), each.name)]
    # which show those too that have panels of their own
    if metric.name not in ("reward/*", "episode/*"):
        assert set(others) <= {metric.name}


def test_what_wandb_is_sent():
    view = VIEWS[0]
    made = dashboard.workspace(view, "team", "gspo")
    sent = dashboard.spec(made)
    section = sent["spec"]["section"]
    assert sent["displayName"] == "GSPO: Stability" and sent["name"].startswith("nw-")
    keys = ("objective.value.name", "policy.value.routing_replay")
    assert section["runSets"][0]["grouping"] == [{"section": "config", "name": key} for key in keys]
    assert section["settings"]["shouldAutoGeneratePanels"] is False
    drawn = [panel for each in section["panelBankConfig"]["sections"] for panel in each["panels"]]
    plots = [panel["config"] for panel in drawn if panel["viewType"] == "Run History Line Plot"]
    assert len(plots) == len(view.panels())
    for plot, panel in zip(plots, view.panels(), strict=True):
        assert plot["chartTitle"] == panel.title() and plot["yAxisTitle"] == panel.unit()
        assert plot["xAxis"] == "step" and "groupBy" not in plot, (
            "it would take one of the keys alone"
        )
        assert (plot["groupAgg"], plot["groupArea"]) == ("mean", "minmax")
        assert plot["metrics"] == list(panel.metrics) or plot["metricRegex"] == dashboard.pattern(
            panel.metrics[0]
        )
    texts = "".join(
        panel["config"]["value"] for panel in drawn if panel["viewType"] == "Markdown Panel"
    )
    for panel in view.panels():
        for metric in panel.entries():
            assert metric.meaning.replace("*", r"\*") in texts
    assert sent == dashboard.spec(dashboard.workspace(view, "team", "gspo"))
    assert sent["name"] != dashboard.spec(dashboard.workspace(view, "team", "other"))["name"]
    by = json.dumps(dashboard.spec(dashboard.workspace(VIEWS[2], "team", "gspo", by=("optim.lr",))))
    assert '"optim.value.lr"' in by and "objective.value.name" not in by


def test_replay_is_compared_within_grpo_alone():
    (view,) = (view for view in VIEWS if view.only)
    section = dashboard.spec(
        dashboard.workspace(view, "team", "gspo", by=("optim.lr",), study="known")
    )["spec"]["section"]
    (runs,) = section["runSets"]
    assert [(each["key"]["name"], each["value"]) for each in runs["filters"]["filters"]] == [
        ("jobType", "train"), ("group", "known"), ("tags", ["grpo"]),
    ]  # fmt: skip
    assert runs["grouping"] == [{"section": "config", "name": "policy.value.routing_replay"}]
    assert '"optim.value.lr"' not in json.dumps(section)


@pytest.mark.slow
def test_what_a_mean_goes_over_is_said(tmp_path):
    for lr in (1e-4, 2e-4):
        write(tmp_path / "runs", "gspo", HEALTHY, optim__lr=lr)
    default = "by=[objective.name,policy.routing_replay] draws means over optim.lr beside seeds"
    assert default in call(cwd=tmp_path).stdout
    for replay in ("none", "r2"):
        write(tmp_path / "runs", "grpo", HEALTHY, policy__routing_replay=replay, optim__lr=1e-4)
    replayed = call("by=objective.name", "study=known", cwd=tmp_path).stdout
    assert "draws means over optim.lr, policy.routing_replay beside seeds" in replayed
    assert (
        "draws means over"
        not in call("by=[objective.name,policy.routing_replay,optim.lr]", cwd=tmp_path).stdout
    )
    other = call("study=other", cwd=tmp_path)
    assert "no run under runs of study other" in other.stdout


def test_without_an_account_the_json_is_written_and_the_command_said(tmp_path):
    write(tmp_path / "runs" / "a", "gspo", HEALTHY)
    done = call("project=mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stability = json.loads((tmp_path / "figures/dashboard/stability.json").read_text())
    assert stability["project"] == "mine"
    call("out=env", cwd=tmp_path, WANDB_PROJECT="theirs", WANDB_ENTITY="us")
    assert json.loads((tmp_path / "env/stability.json").read_text())["project"] == "theirs"
    assert "left out, for no run under runs has recorded them: reward/*" in done.stdout
    assert "To publish: wandb login; gspo dashboard project=mine" in done.stdout
    empty = call("runs=nowhere", "out=all", cwd=tmp_path)
    assert "checked against the registry alone" in empty.stdout and len(
        list((tmp_path / "all").iterdir())
    ) == len(VIEWS)


def test_a_run_of_another_version_is_named_and_left_out(tmp_path):
    folder = write(tmp_path / "runs", "gspo", HEALTHY)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 91, "my/metric": 1.0}\n')
    done = call(cwd=tmp_path)
    assert (
        done.returncode == 0
        and f"{folder.name} has recorded my/metric, which is on no panel" in done.stdout
    )


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_is_one_line(tmp_path):
    write(tmp_path / "runs", "gspo", HEALTHY)
    done = call(cwd=tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    assert (
        done.returncode == 2
        and "W&B does not answer: " in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (
            "porject=x",
            "porject=x: there is no such option; the nearest is project=",
        ),
        ("by=[objective.name,optim.rate]", "no run under runs has the setting 'optim.rate'"),
        ("publish=maybe", "publish=maybe: choose true or false"),
        ("project=", "project=: name a W&B project"),
        ("study=it's", "study=\"it's\": W&B's filters take letters"),
    ],
)
def test_wrong_options_end_in_one_line(argument, said, tmp_path):
    write(tmp_path / "runs" / "a", "gspo", HEALTHY)
    done = call(argument, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_with_an_account_views_are_saved_and_replaced(tmp_path):
    write(tmp_path / "runs" / "a", "gspo", HEALTHY)
    with serving() as server:
        first = call("project=mine", cwd=tmp_path, **server.environment)
        assert first.returncode == 0, first.stderr
        saved = {view["displayName"]: view for view in server.views.values()}
        assert (
            "GSPO: Stability" in saved and "GSPO: Mismatch" in saved and server.projects == ["mine"]
        )
        at = re.search(r"GSPO: Stability: (http\S+/team/mine\?nw=\w+)", first.stdout)
        assert at and at[1].split("=")[1] in saved["GSPO: Stability"]["name"]
        before = len(server.views)
        again = call("project=mine", "by=optim.lr", cwd=tmp_path, **server.environment)
        assert again.returncode == 0 and len(server.views) == before and at[1] in again.stdout
        assert "optim.value.lr" in saved["GSPO: Stability"]["spec"]
        server.refuses = True
        refused = call("project=mine", cwd=tmp_path, **server.environment)
        assert (
            refused.returncode == 2 and "W&B did not save the views of team/mine" in refused.stderr
        )
        assert "permission denied" in refused.stderr and "Traceback" not in refused.stderr


EVERYTHING = {  # runs that together report every metric there is
    "a critic, a KL term, votes": "preset=ppo kl=loss evaluation.samples=3 "
    "cold_start.steps=500 cold_start.lr=5e-3 task.max_operands=2 task.largest=5 tracking.snr_every=1",
    "dynamic sampling": "preset=dapo task=mixed_tiny reward.overlong_cache=4 trainer.mask_truncated=true",
    "an engine of its own, old responses": "objective=grpo_verl correction=mis rollout.staleness=2 "
    "rollout.dtype=bfloat16 rollout.max_prompt_tokens=100 trainer.router_aux_loss_coef=0.001 "
    "trainer.entropy_coef=0.001",
    "episodes": "task=guessing rollout.max_new_tokens=30 cold_start.steps=200 tracking.record_every=2",
    "kept tokens, a mask, prompts and responses": "objective=vespo correction=opsm rollout.top_p=0.9 "
    "rollout.keep_mask=true tracking.information_every=2",
    "named rewards, variances": "task=rows task.train_path=rows.jsonl task.reward=two_rewards:score "
    "reward.weights={digit:1,short:0.5} advantage=otb objective=gspo_token cold_start.steps=0",
}


TWO_REWARDS = """
def score(prompt, response, row):
    return {"digit": float(response[:1].isdigit()), "short": 1 - len(response) / 20}
"""


@pytest.mark.slow
def test_every_panel_shows_a_metric_that_some_run_records(tmp_path):
    small = (
        "study=all task=math steps=4 cold_start.steps=4 cold_start.batch_size=8 threads=1 model.hidden=16 "
        "model.layers=2 model.heads=2 model.experts=4 model.expert_width=8 rollout.prompts_per_step=4 "
        "rollout.group_size=4 rollout.max_new_tokens=12 trainer.minibatches=2 evaluation.problems=4 "
        "evaluation.every=2 checkpoint.every=2 optim.lr=1e-3 tracking.wandb=disabled"
    )
    user_code.write(tmp_path)  # one of the panels is for metrics of the user's own
    (tmp_path / "two_rewards.py").write_text(TWO_REWARDS, encoding="utf-8")
    rows = [{"prompt": f"{n} =", "answer": str(n)} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    for overrides in EVERYTHING.values():
        own = "metrics.long=own_package.extras:Long"
        command = [
            sys.executable,
            "-P",
            "-m",
            "gspo",
            "train",
            *small.split(),
            *overrides.split(),
            own,
        ]
        done = forked.run(command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    frames = [record.rows for record in sources.records(tmp_path / "runs" / "all")]
    names = {name for rows in frames for name in rows.columns[pd.notna(rows).any()]}
    kept, missing = recorded(VIEWS, names)
    assert missing == [] and kept == VIEWS
