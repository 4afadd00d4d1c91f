"""The mathematics of GSPO as functions of tensors.

    objectives/         the policy loss of every token: GSPO, GRPO, PPO, CISPO, ...
    aggregation.py      from the loss of every token to one number
    advantages.py       from rewards to the advantage of every token
    turn_advantage.py   an advantage for every turn of an episode
    maxrl.py, gdpo.py, nsr.py, otb.py    further advantages: MaxRL, GDPO, NSR, OTB
    mutual_information.py    how much responses tell of their prompts
    reward_shaping.py   changes to rewards before advantages: penalties, scaling
    kl.py               the distance from a reference policy
    corrections.py      weights for the mismatch of engine and trainer
    masks.py            further corrections: KPop, M2PO, OPSM, rho
    entropy.py          the coefficient of the entropy bonus
    invariances.py      checks that every objective must pass (`gspo check-objective`), on the random
                        inputs of invariance_inputs.py

Every module states its equations above the code, with the same symbols.
"""
