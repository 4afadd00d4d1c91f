"""Small random models of the causal architectures of transformers, and how the program runs each of
them.

    python tests/support/architectures.py              a table of all
    python tests/support/architectures.py qwen3_next rwkv

Names are the `model_type` of configurations. A configuration is cut to a small one by the usual
names of its sizes; architectures for which that gives none that works are listed too.
"""

import contextlib
import io
import logging
import resource
import sys
import warnings

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo.model.policy import Policy
from gspo.model.tokenizer import character_tokenizer
from gspo.rollout.engines.transformers_decode import disagreement

LARGEST = 6e7  # parameters of a model that was cut
ADDRESS_SPACE = 9 << 30  # bytes; some configurations that cannot be cut would take all memory
SIZES = {
    64: (
        "hidden_size intermediate_size n_embd d_model hidden_dim lru_width ffn_dim dim_ff word_embed_proj_dim "
        "attention_hidden_size"
    ),
    4: (
        "num_hidden_layers num_layers n_layer n_layers num_attention_heads n_head n_heads num_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts num_blocks linear_num_value_heads"
    ),
    2: (
        "num_key_value_heads num_experts_per_tok num_experts_per_token moe_k linear_num_key_heads index_n_heads expand "
        "num_attention_groups num_query_groups altup_num_inputs mamba_expand"
    ),
    16: (
        "head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim q_lora_rank "
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim hidden_size_per_layer_input"
    ),
    32: ("moe_intermediate_size shared_expert_intermediate_size qk_head_dim"),
    8: (
        "state_size mamba_d_state mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank sliding_window "
        "block_size rotary_dim laurel_rank"
    ),
    1: (
        "mamba_n_groups n_groups n_group topk_group first_k_dense_replace num_mem_blocks mamba_ngroups"
    ),
    0: ("num_kv_shared_layers"),
    128: ("max_position_embeddings n_positions n_ctx max_seq_len mamba_d_ssm"),
    4096: ("index_topk"),
}


def small_model(kind: str) -> transformers.PreTrainedModel:
    """Return a random model of an architecture whose logits are of usual size. Raises many types of
    errors where the sizes do not fit the architecture."""
    tokenizer = character_tokenizer()
    config = CONFIG_MAPPING[kind]().get_text_config()
    given = config.to_dict()
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    if given.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {name: len(tokenizer) for name in ("vocab_size", "vocab_size_per_layer_input")}
    sizes |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes["eos_token_id"] = tokenizer.eos_token_id
    # where None is no size
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id", "num_experts_per_tok")
    plain = (int, float, type(None))
    cut = {
        name: size
        for name, size in sizes.items()
        if name in given
        and isinstance(given[name], plain)
        and (given[name] is not None or name in tokens)
    }
    if isinstance(given.get("layer_types"), list):
        kinds = list(dict.fromkeys(given["layer_types"]))
        cut["layer_types"] = (kinds * 4)[: max(4, len(kinds))]
        cut["num_hidden_layers"] = len(cut["layer_types"])
    config = type(config)(**cut)
    with torch.device("meta"):
        parameters = sum(
            p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()
        )
    if parameters > LARGEST:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.std() < 0.05:
                torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def verdict(kind: str) -> str:
    """Return how the program runs an architecture, in a few words."""
    try:
        model = small_model(kind)
    except Exception as error:  # many configurations check many things
        return f"not made: {type(error).__name__}"
    try:
        policy = Policy(model, character_tokenizer())
    except ValueError as error:
        return f"refused: {error}"
    if policy.network:
        return "our own forward"
    words = f"its own forward, padding on the {policy.padding_side}"
    reason = disagreement(policy)
    return f"{words}, no cache: {reason}" if reason else f"{words}, its cache"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for kind in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            words = verdict(kind)
        print(f"{kind:<28} {words}", flush=True)


if __name__ == "__main__":
    main()
