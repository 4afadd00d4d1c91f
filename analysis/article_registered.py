"""The registered criteria of the article (article.py), and their verdicts.

experiments/STUDIES.md has the registrations. article_criteria.py has the rules.
"""

from functools import partial

from gspo.analysis.article_criteria import Criterion, Part, criterion, judge
from gspo.analysis.article_doses import ENOUGH
from gspo.analysis.article_entries import Numbers
from gspo.analysis.article_numbers import ARENA_TASKS
from gspo.analysis.stability_claims import CHANGED, MIN_DECLINE

# a ratio of critical rates, against 1
decided = partial(criterion, rule="decided", line=1)
EDGE = "edge.paper_ranges"
ARMS_OF_I = (
    "GSPO",
    "GRPO [clip range 0.2]",
    "GRPO [clip range 0.05]",
    "GRPO + Routing Replay (R2)",
    "GRPO [OPSM]",
    "CISPO",
    "SAPO",
    "GMPO",
    "MiniRL",
    "VESPO",
    "CTPO",
    "prime-rl",
    "DPPO",
)
RIVALS_OF_ARENA = ARMS_OF_I[1:]
# in the order of the article's table
REGISTERED = {
    "edge.stopped": criterion("yes", f"{EDGE}_at_3.5e-4.replay"),
    "edge.comfortable": criterion("yes", "edge.comfortable.{replay,plain,none}", rule="same"),
    "edge.paper.replay": criterion("yes", f"{EDGE}.replay"),
    "edge.paper.plain": criterion("yes", f"{EDGE}.plain"),
    "edge.paper.none": criterion("yes", f"{EDGE}.none"),
    "edge.own.replay": criterion("yes", "edge.edge_rate.replay", rule="same"),
    "edge.own.plain": criterion("yes", "edge.edge_rate.plain", rule="same"),
    "edge.own.none": criterion("yes", "edge.edge_rate.none", rule="same"),
    "edge.quarter": criterion("yes", "edge.own_range.replay", "edge.own_range.plain"),
    "edge.again": criterion("yes", "edge.edge_rate_again.{replay,plain,none}", rule="same"),
    "beyond.plain": criterion("yes", "edge.beyond_edge.plain"),
    "beyond.replay": criterion("yes", "edge.beyond_edge.replay"),
    "beyond.falls": criterion("yes", "edge.fall.grpo", "edge.fall.replay", line=100 * MIN_DECLINE),
    "beyond.gspo": criterion("yes", "edge.fall.gspo", line=100 * MIN_DECLINE),
    "beyond.held_out": criterion("yes", "edge.beyond_edge.held_out"),
    "sums.plain": criterion("yes", "sums.plain"),
    "sums.quarter": criterion("yes", "sums.quarter", rule="same"),
    "sums.replay": criterion("not said", "sums.replay"),
    "effect.edge": criterion("yes", "effect.edge.replay"),
    "effect.comfortable": criterion("yes", "effect.comfortable.replay", rule="same"),
    "effect.range": Criterion(
        "yes",
        (Part("effect.gain"), Part("effect.range.replay", "not_above")),
        joint=True,
    ),
    "A.plain": criterion("yes", "A.{4,16,top1}.ratio.plain", line=1),
    "A.replay": criterion("yes", "A.{4,16,top1}.ratio.replay", line=1),
    "A.step": criterion("yes", "A.4.ratio.quarter", rule="within", line=1),
    "A.none": criterion("open", "A.{4,16,top1}.ratio.none", line=1),
    "decided.plain": decided("yes", "decided.4.ratio.plain"),
    "decided.replay": decided("yes", "decided.4.ratio.replay"),
    "decided.step": decided("same", "decided.4.ratio.quarter"),
    "decided.none": decided("undecided", "decided.4.ratio.none"),
    "decided.others.plain": decided("not said", "decided.{16,top1}.ratio.plain"),
    "decided.others.replay": decided("not said", "decided.{16,top1}.ratio.replay"),
    "decided.others.none": decided("undecided", "decided.{16,top1}.ratio.none"),
    "K.plain": decided("yes", "K.ratio.plain"),
    "K.replay": decided("yes", "K.ratio.replay"),
    "K.step": decided("undecided", "K.ratio.quarter"),
    "K.none": decided("undecided", "K.ratio.none"),
    "L.plain": decided("undecided", "L.ratio.plain"),
    "L.replay": decided("undecided", "L.ratio.replay"),
    "L.step": decided("undecided", "L.ratio.quarter"),
    "L.none": decided("undecided", "L.ratio.none"),
    "M.plain": decided("yes", "M.ratio.plain"),
    "M.step": decided("same", "M.ratio.quarter"),
    "B.turn": Criterion(
        "no",
        (
            Part("B.plain.16", "above", expected=False),
            Part("B.plain.32", "below", expected=False),
        ),
        joint=True,
    ),
    "B.level": criterion("yes", "B.{GSPO,replay,CISPO,GMPO,SAPO,MiniRL}.{2,4}", rule="level"),
    "B.falls": criterion("yes", "B.loss.{GRPO,GSPO,replay,CISPO,GMPO,SAPO,MiniRL}"),
    "C.two_bits": criterion("yes", "C.harm.none.GRPO.int2", "C.harm.none.GSPO.int2", rule="below"),
    "C.four_bits": criterion(
        "yes", "C.harm.none.GRPO.fp4_e2m1", "C.harm.none.GSPO.fp4_e2m1", rule="same"
    ),
    "C.most": criterion("yes", "C.most.fp4_e2m1", rule="below"),
    "C.tis": criterion("yes", "C.tis.GRPO.int2"),
    "C.r3": criterion("little", "C.r3.GSPO.int2", "C.r3.GRPO.int2"),
    "C.better": criterion("no", "C.plain.engine.fp4_e2m1", "C.plain.engine.int3"),
    "D.harm": criterion("yes", "D.loss.14", "D.loss.60"),
    "D.replay": Criterion(
        "at 14 perhaps, at 60 no",
        (Part("D.replay.14", expected=None), Part("D.replay.60", expected=False)),
    ),
    "D.without": Criterion(
        "no",
        (
            Part("D.plain.60", expected=False),
            Part("D.gspo_replay.60", "not_above", expected=False),
        ),
        joint=True,
    ),
    "D.frozen": criterion("yes", "D.frozen.GSPO", "D.frozen.GRPO", rule="frozen"),
    "E.grpo": criterion("yes", "E.grpo.0", "E.grpo.28", "E.grpo.290", rule="same"),
    "E.others": criterion("yes", "E.{cispo,token}.{0,28,290}", rule="same"),
    "E.clip": Criterion(
        "at 50 and 90 %",
        (
            Part("E.below_half.0", "below", expected=False),
            Part("E.below_half.28", "below"),
            Part("E.below_half.290", "below"),
        ),
    ),
    "E.cost": criterion("no", "E.mistake.0", "E.mistake.28", "E.mistake.290"),
    "F.share": criterion("yes", "F.{low,high}.{head,all,engine}.clipped"),
    "F.head": criterion("yes", "F.low.help.GSPO", "F.high.help.GSPO"),
    "F.enough": criterion("no", "F.low.head.floor", "F.high.head.floor", rule="below", line=ENOUGH),
    "F.reward": criterion(
        "yes", "F.{low,high}.{head,all}.reward.{GSPO,GSPO-token,GRPO,CISPO}", rule="level"
    ),
    "F.engine": criterion("yes", "F.{low,high}.engine.reward.GSPO", rule="below"),
    "H.gain": criterion("yes", "H.high.p90.reward.GSPO"),
    "H.harm": criterion(
        "not said", "H.{low,high}.{p90,p95,p99}.held_out.{GSPO,GRPO}", rule="below"
    ),
    "H.nothing": criterion("yes", "H.low.{p95,p99}.{reward,held_out}.{GSPO,GRPO}", rule="same"),
    "H.cut": criterion("yes", "H.{low,high}.p90.cut.{GSPO,GRPO}", rule="below"),
    "H.cut_little": criterion("yes", "H.{low,high}.p99.cut.{GSPO,GRPO}", rule="same"),
    "I.head": criterion("yes", *(f"I.head.reward.{arm}" for arm in ARMS_OF_I), rule="same"),
    "I.all": criterion("yes", "I.all.reward.CISPO", "I.all.reward.SAPO", rule="below"),
    "I.engine": criterion("yes", "I.engine.reward.GSPO", "I.engine.reward.MiniRL", rule="below"),
    "I.clip": criterion("yes", "I.{head,all,engine}.clip.GSPO", rule="changes"),
    "I.clip_others": criterion(
        "yes",
        *(f"I.engine.clip.{arm}" for arm in ("GMPO", "MiniRL", "GRPO + Routing Replay (R2)")),
        rule="changes",
    ),
    "arena.comfortable": criterion(
        "yes",
        *(f"arena.{task}_comfortable.{arm}" for task in ARENA_TASKS for arm in RIVALS_OF_ARENA),
        "arena.tools_comfortable.GSPO-token",
        rule="same",
    ),
    "arena.above": criterion(
        "no", *(f"arena.{task}_{cell}.SAPO" for task in ARENA_TASKS for cell in ("edge", "sixteen"))
    ),
    "arena.sapo": criterion("yes", "arena.tools_edge.SAPO", rule="below"),
    "arena.ranking": criterion(
        "2 or 3 groups", *(f"arena.mean.{arm}" for arm in RIVALS_OF_ARENA), rule="below"
    ),
}
# what the text and the table of the paper's claims say beside these
CLAIMS = {
    "claim.comfortable.replay": criterion("", "edge.comfortable.replay", rule="same"),
    "claim.twenty.replay": criterion("", "edge.twenty.replay", rule="same"),
    "claim.twenty.plain": criterion("", "edge.twenty.plain", rule="same"),
    "claim.compute": criterion("", "edge.comfortable.compute", line=1),
    "claim.held_out.comfortable": criterion("", "edge.comfortable.held_out", rule="same"),
    "claim.held_out.edge": criterion("", "edge.edge_rate.held_out", rule="same"),
    "claim.held_out.paper": criterion("", f"{EDGE}_at_3.5e-4.held_out"),
    "claim.clips": criterion("", f"{EDGE}.clip", line=1),
    "claim.declines": criterion(
        "", "edge.comfortable.fall", "edge.edge_rate.fall", line=100 * MIN_DECLINE
    ),
    "claim.declines.beyond": criterion("", "edge.fall.grpo", line=100 * MIN_DECLINE),
    "claim.replay": criterion("", "edge.comfortable.none", "edge.edge_rate.none", rule="same"),
    "claim.tuned": criterion("", "edge.own_range.plain", rule="below"),
    "claim.stable": criterion("", "edge.fall.gspo", rule="below", line=100 * MIN_DECLINE),
    "claim.experts": Criterion(
        "",
        (
            Part("edge.changed.interval", line=100 * CHANGED[0], expected=None),
            Part("edge.changed.limit", "below", line=100 * CHANGED[1], expected=None),
        ),
        joint=True,
    ),
    "claim.protects": criterion("", "D.replay.60"),
    "claim.withstands": criterion("", "D.loss.GSPO.60", rule="below"),
    "claim.engine": criterion("", "C.plain.engine.fp4_e2m1"),
    "claim.r3": criterion("", "C.r3.GRPO.int2"),
    "claim.turn.ahead": criterion("", "B.plain.16"),
    "claim.turn.behind": criterion("", "B.plain.32", rule="below"),
    "claim.tools": criterion("", "E.grpo.28", "E.grpo.290", rule="same"),
    "claim.all_tokens": criterion("", "E.mistake.290", rule="below"),
    "claim.bfloat16": criterion("", "F.low.all.reward.GSPO", rule="same"),
    "claim.head": criterion("", "F.low.help.GSPO"),
    "claim.sapo": criterion("", "arena.sums_edge.SAPO"),
    "claim.stale": criterion("", "arena.mixed_stale.GRPO [clip range 0.2]", rule="below"),
    "claim.first": criterion("", "arena.mean.GRPO [OPSM]", rule="below"),
    "I.all_cispo": criterion("", "I.all.reward.CISPO", rule="below"),
    "claim.head_first": criterion("", "F.low.help_first.GSPO"),
}


def judge_all(numbers: Numbers) -> dict[str, dict[str, str]]:
    """Return the verdicts of all registered criteria and claims by their names."""
    return {name: judge(rule, numbers) for name, rule in (REGISTERED | CLAIMS).items()}
