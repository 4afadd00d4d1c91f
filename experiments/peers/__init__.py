"""Other frameworks' losses, advantages and weights, restated in this project's terms and compared
number by number.

    vectors.py   golden vectors: a folder of JSON files with inputs, and what a peer's own function
                 returns for them
    options.py   the peer's options, and which of them were read
    recipe.py    a peer's policy loss as our objective, aggregation, KL term and correction; and its
                 value
    losses.py    the policy losses of verl, OpenRLHF, slime, SkyRL and AReaL
    hugging.py   those of TRL and ms-swift, which share their options' names
    roll.py      those of ROLL
    clips.py     each peer's clip counters, from our loss outputs
    off_policy.py  the losses and masks of 2026: VESPO, OPSM, M2PO, KPop, rho, prime-rl, DRO,
                 CTPO, P3O
    result.py    what our side of an entry consists of
    credit.py    advantages, reward normalisation, baselines
    credit_2026.py  the advantages of 2026: MaxRL, GDPO, NSR, OTB
    others.py    KL estimators, the KL coefficient's controller, weights for the mismatch of engine
                 and trainer
    compare.py   one entry: our value, the differences, the tolerance, the verdict
    table.py     the Markdown page (experiments/PARITY.md)
    defaults.py  in words: how each peer's defaults differ from ours

A peer is another framework. `python experiments/parity.py` runs this package and nothing else
imports it: it provides evidence, and training does not depend on it.
"""
