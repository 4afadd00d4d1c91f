"""The bias with which routers select experts is a buffer, and must reach engines like the weights."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders import batch_of, fed, sample, small_policy
from gspo.distributed.ranks import Ranks
from gspo.evaluation.resumable import weights_digest
from gspo.model.policy import Policy
from gspo.model.routers import SELECTION_BIAS
from gspo.model.settings import LoraSettings
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.quantization import quantize
from gspo.rollout.engines.vllm_base import VLLMEngineBase
from gspo.rollout.engines.weights_folder import WeightsFolder
from gspo.rollout.vllm_settings import VLLMRollout
from moe_families import LAYERS, MOE_FAMILIES

BIASED = ("minimax_m2", "deepseek_v3", "glm4_moe", "dots1", "kimi_linear", "nemotron_h", "deepseek_v4")  # fmt: skip


def biases(policy: Policy) -> dict[str, torch.Tensor]:
    tensors = policy.model.state_dict().items()
    return {name: tensor for name, tensor in tensors if name.endswith(SELECTION_BIAS)}


def set_biases(policy: Policy, seed: int = 9) -> None:
    """Change the biases, as training with auxiliary-loss-free balancing would."""
    generator = torch.Generator().manual_seed(seed)
    for bias in biases(policy).values():
        bias.normal_(0, 1, generator=generator)


@pytest.mark.parametrize("family", BIASED)
def test_they_are_among_the_weights_that_engines_load(family):
    policy = small_policy(MOE_FAMILIES[family])
    assert len(biases(policy)) == LAYERS
    assert biases(policy).keys() <= dict(policy.named_tensors()).keys()
    before = weights_digest(policy.model)
    lower = policy.copy(torch.bfloat16)
    set_biases(policy)
    assert weights_digest(policy.model) != before, "another model"
    lower.load_tensors(policy.named_tensors())
    for name, bias in biases(lower).items():
        assert bias.dtype == torch.float32 and torch.equal(bias, biases(policy)[name])


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_an_engine_in_the_process_chooses_by_the_new_bias(family):
    policy = small_policy(MOE_FAMILIES[family])
    engine = LocalEngine(policy)
    engine.shares_weights, engine.sampler = False, policy.copy(torch.float32)
    set_biases(policy)
    engine.load_weights(policy.named_tensors())
    batch = batch_of(policy, sample(engine.sampler, record_experts=True))
    own, theirs = batch.experts_BSLK[fed(batch)], batch.engine_experts_BSLK[fed(batch)]
    same = (own.sort(-1).values == theirs.sort(-1).values).all(-1)
    assert same.float().mean() > 0.99


def test_they_come_along_with_an_adapter():
    policy = small_policy(MOE_FAMILIES["glm4_moe"])
    policy.adapt(LoraSettings(rank=2, targets="attention"), seed=1)
    set_biases(policy)
    merged = dict(policy.named_tensors())
    assert biases(policy).keys() <= merged.keys() and policy.shapes().keys() == merged.keys()
    copied = policy.copy()
    for name, bias in biases(copied).items():
        assert torch.equal(bias, biases(policy)[name])


class Loading(VLLMEngineBase):
    """An engine outside the process that stores weights in bfloat16, as far as loading goes."""

    def __init__(self, policy: Policy, folder):
        super().__init__(policy, VLLMRollout(), Ranks())
        self.folder = WeightsFolder()
        self.folder.path, self.folder.lock = folder, -1
        self.stored_dtype = torch.bfloat16
        self.loaded: dict[str, torch.Tensor] = {}

    def _ask(self, method, *arguments):
        if method == "load":
            self.loaded |= load_file(*arguments)
        return True

    def close(self) -> None:
        pass


def test_an_engine_outside_the_process_gets_them_unrounded(tmp_path):
    policy = small_policy(MOE_FAMILIES["glm4_moe"])
    set_biases(policy)
    engine = Loading(policy, tmp_path)
    engine.load_weights(policy.named_tensors())
    for name, tensor in policy.named_tensors():
        if name in biases(policy):
            assert torch.equal(engine.loaded.pop(name), tensor)
        else:
            assert torch.equal(engine.loaded.pop(name), tensor.bfloat16())
    assert not engine.loaded


def test_entries_of_dense_layers_are_left_out_of_an_engines_experts(tmp_path):
    """vLLM on a GPU returns an entry for every layer of the model."""
    policy = small_policy(MOE_FAMILIES["glm4_moe"])
    engine = Loading(policy, tmp_path)
    layers = policy.model.config.num_hidden_layers
    assert layers == LAYERS + 1 and policy.routing.layer_numbers == [1, 2]
    all_layers = np.arange(5 * layers * 2).reshape(5, layers, 2)
    assert (engine._of_moe_layers(all_layers) == all_layers[:, 1:]).all()
    assert engine._of_moe_layers(all_layers[:, 1:]).shape == (5, LAYERS, 2)
    every = Loading(small_policy(MOE_FAMILIES["mixtral"]), tmp_path)
    assert every._of_moe_layers(all_layers[:, :2]).shape == (5, LAYERS, 2)


def test_rounding_leaves_routers_with_a_table_alone():
    policy = small_policy(MOE_FAMILIES["deepseek_v4"])
    before = [parameter.clone() for parameter in policy.routing.parameters()]
    quantize(policy, "int3")
    after = policy.routing.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
