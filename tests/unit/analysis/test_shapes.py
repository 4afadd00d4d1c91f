"""Figures of studies of any shape: every text can be read, or the figure says in one line why it
cannot be drawn.
"""

import warnings
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import shapes
from daily import daily_but
from gspo.analysis import (
    choosing,
    fig1_stability,
    fig2_clipping,
    fig3_routing_replay,
    fig_curves,
    fig_efficiency,
    fig_objectives,
    fig_routing,
    load,
)
from gspo.analysis.style import FigureOptions
from gspo.cli.main import figure_files
from overlaps import overlaps

SHAPES = {
    "one arm": {"arms": 1},
    "two arms of one seed": {"arms": 2, "seeds": (1,)},
    "two arms, a setting": {"arms": 2, "varied": ("optim.lr",)},
    "two arms, two settings": {"arms": 2, "varied": ("optim.lr", "trainer.minibatches")},
    "three arms, three settings": {
        "arms": 3,
        "varied": tuple(shapes.VALUES),
        "seeds": (1,),
        "steps": 21,
    },
    "three arms": {"arms": 3},
    "three arms without clipping": {"arms": 3, "missing": ("clip/", "policy/entropy")},
    "four arms, one with a long name": {"arms": 4, "long_name": True},
    "three arms, one collapsed": {"arms": 3, "collapsed": True},
    "twelve arms": {"arms": 12},
}
FIGURES = {
    "stability": fig1_stability,
    "clipping": fig2_clipping,
    "routing-replay": fig3_routing_replay,
    "curves": fig_curves,
    "efficiency": fig_efficiency,
    "objectives": fig_objectives,
    "routing": fig_routing,
}
# What a figure cannot show, and how its one line begins.
REFUSED = {
    ("one arm", "routing-replay"): "fig3 needs arms GRPO",
    ("one arm", "efficiency"): "fig_efficiency needs arms GSPO and GRPO",
    ("two arms of one seed", "routing-replay"): "fig3 needs arms GRPO",
    ("two arms, a setting", "stability"): "fig1 compares GSPO and GRPO at one setting, and these runs also vary",
    ("two arms, a setting", "routing-replay"): "fig3 needs arms GRPO",
    ("two arms, a setting", "efficiency"): "fig_efficiency compares GSPO and GRPO at one setting",
    ("two arms, two settings", "stability"): "fig1 compares GSPO and GRPO at one setting",
    ("two arms, two settings", "routing-replay"): "fig3 needs arms GRPO",
    ("two arms, two settings", "efficiency"): "fig_efficiency compares GSPO and GRPO at one setting",
    ("three arms without clipping", "clipping"): "fig2 needs clip/token_active",
    **{
        ("three arms, three settings", name): f"{figure} "
        for name, figure in {
            "stability": "fig1", "clipping": "fig2", "routing-replay": "fig3", "curves": "fig_curves",
            "efficiency": "fig_efficiency", "objectives": "fig_objectives", "routing": "fig_routing",
        }.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The study of a shape, which is written once."""
    made = {}

    def study(shape: str) -> load.Data:
        if shape not in made:
            made[shape] = load.load(
                [shapes.write_study(tmp_path_factory.mktemp("shape"), **SHAPES[shape])]
            )
        return made[shape]

    return study


# At every change each figure is drawn of one study, the curves of two.
DRAWN = {
    "stability": ("four arms, one with a long name",),
    "clipping": ("two arms of one seed",),
    "routing-replay": ("three arms",),
    "curves": ("two arms, two settings", "twelve arms"),
    "efficiency": ("three arms, one collapsed",),
    "objectives": ("one arm",),
    "routing": ("three arms without clipping",),
}
PAIRS = [
    pytest.param(
        shape,
        name,
        marks=[] if shape in DRAWN[name] else pytest.mark.daily,
        id=f"{shape}-{name}",
    )
    for shape in SHAPES
    for name in FIGURES
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "name"), PAIRS)
def test_no_text_covers_another_or_the_figure_says_what_it_cannot_show(
    studies, tmp_path, monkeypatch, shape, name
):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    if (shape, name) in REFUSED:
        with pytest.raises(load.RunsError) as refused:
            FIGURES[name].draw(studies(shape), tmp_path, FigureOptions(formats=("png",)))
        assert str(refused.value).startswith(REFUSED[shape, name]) and "\n" not in str(
            refused.value
        )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where panels do not fit beside each other
        FIGURES[name].draw(studies(shape), tmp_path, FigureOptions(formats=("png",)))
    assert overlaps(saved[0]) == []
    empty = [ax for ax in saved[0].axes if ax.axison and not ax.has_data() and not ax.texts]
    assert not empty, "a panel has nothing in it"


@pytest.mark.slow
@pytest.mark.parametrize("recorded", ["edge_rate", "effect"])
@pytest.mark.parametrize("name", daily_but(FIGURES, "stability", "clipping"))
def test_the_gallery_has_no_empty_panel_and_no_text_over_another(
    tmp_path, monkeypatch, name, recorded
):
    """Pictures of docs/results.md and of `make reproduce`. The recorded rows lack some metrics."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    data = load.load([Path(__file__).parents[3] / "analysis" / "data" / f"{recorded}.parquet"])
    FIGURES[name].draw(data, tmp_path, FigureOptions(formats=("png",)))
    assert overlaps(saved[0]) == []
    assert [
        ax.get_title() for ax in saved[0].axes if ax.axison and not ax.has_data() and not ax.texts
    ] == []


def test_curves_of_a_varied_objective_beside_another_setting_are_drawn(tmp_path, monkeypatch):
    import yaml

    study = shapes.write_study(tmp_path, arms=1, varied=("optim.lr",), seeds=(1, 2))
    for run in list(study.iterdir()):
        other = run.with_name(f"{run.name}-wide")
        other.mkdir()
        (other / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
        settings = yaml.safe_load((run / "settings.yaml").read_text())
        settings["objective"]["clip_low"] = 0.1
        (other / "settings.yaml").write_text(yaml.safe_dump(settings))
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    fig_curves.draw(load.load([study]), tmp_path, FigureOptions(formats=("png",)), ["reward/mean"])
    assert [len(ax.lines) >= 2 for ax in saved[0].axes if ax.axison] == [True] * 3


def test_a_band_of_what_is_never_negative_ends_at_0(studies, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    fig_curves.draw(
        studies("three arms"), tmp_path, FigureOptions(formats=("png",)), ["policy/entropy"]
    )
    (ax,) = (ax for ax in saved[0].axes if ax.axison)
    assert (
        min(path.vertices[:, 1].min() for band in ax.collections for path in band.get_paths())
        == 0.0
    )


def test_runs_are_chosen_by_any_setting(tmp_path):
    study = shapes.write_study(
        tmp_path, arms=2, varied=("optim.lr", "trainer.minibatches"), seeds=(1,)
    )
    chosen = load.load([study], {"optim.lr": "2e-4", "trainer.minibatches": 16})
    assert chosen.arms == ["GSPO", "GRPO"] and len(chosen.runs) == 2
    assert {run.settings["optim.lr"] for run in chosen.runs} == {2e-4}
    with pytest.raises(
        load.RunsError, match=r"where.optim.lr=3: no run has it; there are 0.0002, 0.001, 0.005"
    ):
        load.load([study], {"optim.lr": "3"})
    assert len(load.load([study], {"lr": "2e-4", "objective": "gspo"}).runs) == 2, (
        "short names will do"
    )
    with pytest.raises(load.RunsError, match=r"where.rate=3: these runs have no setting rate; "):
        load.load([study], {"rate": "3"})
    assert (
        not choosing.same_value(True, "1")
        and choosing.same_value(True, "true")
        and not choosing.same_value(1, "true")
    )


def test_arms_with_settings_are_in_the_order_of_their_numbers(studies):
    arms = studies("two arms, two settings").arms
    assert arms[:3] == [
        "GSPO [optim.lr=0.0002, trainer.minibatches=4]",
        "GSPO [optim.lr=0.0002, trainer.minibatches=16]",
        "GSPO [optim.lr=0.001, trainer.minibatches=4]",
    ]


@pytest.mark.slow
def test_every_arm_of_the_curves_has_a_look_of_its_own(studies):
    from gspo.analysis.arm_styles import arm_styles

    for shape in SHAPES:
        drawn = arm_styles(studies(shape).arms)
        assert len({repr(look) for look in drawn.values()}) == len(drawn) or len(drawn) > 12, shape


RECORDED = Path(__file__).parents[3] / "analysis" / "data"
COMMANDS = {  # a figure's words after its name: a shape of a study, or files of recorded studies
    "sweep over a setting": ("sweep", ["two arms, a setting", "x=optim.lr"]),
    "sweep over two": (
        "sweep",
        ["two arms, two settings", "x=optim.lr", "by=trainer.minibatches"],
    ),
    "sweep over three": (
        "sweep",
        ["three arms, three settings", "x=optim.lr", "by=trainer.minibatches"],
    ),
    "sweep of twelve arms": ("sweep", ["twelve arms", "x=seed"]),
    "clip range": ("clip-range", ["two arms of one seed"]),
    "clip range of a sweep": ("clip-range", ["two arms, a setting"]),
    "contrast of two": ("contrast", ["three arms", "three arms, one collapsed"]),
    "contrast of the effect": (
        "contrast",
        ["effect.parquet", "effect_comfortable.parquet", "effect_range.parquet"],
    ),
    "contrast of recorded studies": (
        "contrast",
        ["comfortable.parquet", "paper_ranges.parquet", "edge_rate.parquet"],
    ),
    "critical rate": ("critical-rate", ["critical_rate.parquet"]),
    "dose": (
        "dose",
        [
            "routing_dose.parquet",
            "dose=optim.router_lr_factor",
            "measured=routing/changed_any_layer",
        ],
    ),
    "early warnings": ("early-warning", []),
    "rules of early warnings": ("early-warning", ["rules=true"]),
}
MAY_REFUSE = ("sweep over three", "sweep of twelve arms", "clip range of a sweep", "dose")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    daily_but(COMMANDS, "sweep over two", "contrast of two", "contrast of the effect"),
)
def test_the_other_figures_have_no_text_over_another_either(
    studies, tmp_path_factory, tmp_path, monkeypatch, case
):
    figure, words = COMMANDS[case]
    (file,) = (file for name, file in figure_files().items() if name == figure)
    sources = []
    for word in words:
        if word in SHAPES:
            sources.append(
                str(shapes.write_study(tmp_path_factory.mktemp("shape"), **SHAPES[word]))
            )
        else:
            sources.append(str(RECORDED / word) if word.endswith(".parquet") else word)
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    monkeypatch.setattr("sys.argv", [f"gspo figure {figure}", *sources, f"out={tmp_path}"])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*constrained_layout.*")
            import_module(f"analysis.{file.stem}").main()
    except load.RunsError as refused:
        assert case in MAY_REFUSE and "\n" not in str(refused)
        return
    assert [overlaps(each) for each in {id(each): each for each in saved}.values()] == [[]]
