"""Other frameworks' names for our settings: an error about such a name gives ours.

They come from TRL's GRPOConfig, verl, OpenRLHF, ROLL, ms-swift and W&B.
"""

# Our setting -> other names of it. If only some options have the setting, it names one of them.
OURS: dict[str, str] = {
    "optim.lr": "learning_rate lr actor_learning_rate actor_lr optimizer.lr",
    "optim.warmup_updates": "warmup_steps lr_warmup_steps num_warmup_steps",
    "optim.decay": "lr_scheduler_type lr_scheduler scheduler lr_scheduler_name lr_decay_style",
    "optim.max_grad_norm": "max_grad_norm grad_clip clip_grad max_norm gradient_clipping",
    "optim.weight_decay": "weight_decay l2",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps",
    "optim.name": "optimizer",
    "rollout.group_size": (
        "num_generations n n_samples_per_prompt rollout_n num_samples n_samples num_rollouts "
        "num_return_sequences num_return_sequences_in_group rollouts_per_example group_size g"
    ),
    "rollout.prompts_per_step": (
        "batch_size train_batch_size rollout_batch_size generation_batch_size num_prompts_per_step "
        "prompts_per_step gen_batch_size"
    ),
    "rollout.max_new_tokens": (
        "max_completion_length max_response_length generate_max_len max_new_tokens max_tokens "
        "response_length max_length max_gen_len"
    ),
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "rollout.temperature": "temperature sampling_temperature t",
    "rollout.top_p": "top_p",
    "rollout.top_k": "top_k",
    "rollout.min_p": "min_p",
    "rollout.keep_mask": "keep_sampling_mask return_sampling_mask sampling_mask",
    "rollout.stop": "stop stop_strings stop_sequences generation_kwargs.stop",
    "rollout.refill_rounds": (
        "dynamic_sampling filter_groups enable_dynamic_filtering dynamic_filtering"
    ),
    "rollout=vllm": "use_vllm vllm_mode vllm rollout_backend rollout_name",
    "rollout.gpu_memory (with rollout=vllm)": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "rollout.tensor_parallel_size (with rollout=vllm)": (
        "tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size tp rollout_tp"
    ),
    "rollout.max_model_len (with rollout=vllm)": (
        "vllm_max_model_length max_model_len max_model_length"
    ),
    "rollout.staleness": (
        "max_async_level async_ratio off_policy_steps max_staleness max_off_policy_steps"
    ),
    "tracking.record_every": (
        "rollout.record record record_every save_debug_rollout_data enable_token_export"
    ),
    "trainer.minibatches": (
        "ppo_mini_batch_size mini_batch_size num_minibatches num_mini_batches steps_per_generation "
        "minibatches"
    ),
    "trainer.epochs": "num_iterations ppo_epochs mu update_epochs num_ppo_epochs max_epochs",
    "trainer.micro_batch_size": (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu train_micro_batch_size"
    ),
    "trainer.aggregation.mode": "loss_type loss_agg_mode loss_aggregation loss_reduction",
    "trainer.mask_truncated": (
        "mask_truncated_completions overlong_filter mask_truncated overlong_filtering"
    ),
    "trainer.entropy_coef": "entropy_coef entropy_coeff entropy_loss_coef ent_coef entropy_bonus",
    "trainer.router_aux_loss_coef": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff",
    "kl.coef (with kl=loss)": (
        "beta kl_coef kl_loss_coef init_kl_coef init_kl_coeff kl_beta kl_penalty_coef kl_coeff"
    ),
    "kl.estimator (with kl=loss)": "kl_estimator kl_loss_type kl_penalty kl_type",
    "kl=loss": "use_kl_loss use_kl use_kl_estimator_k3",
    "kl.refresh_every (with kl=loss)": "sync_ref_model ref_model_sync_steps ref_update_interval",
    "objective.clip_low": (
        "epsilon eps clip_range cliprange clip_ratio clip_ratio_low eps_clip eps_clip_low "
        "epsilon_low clip_eps clip clip_low"
    ),
    "objective.clip_high": "epsilon_high clip_ratio_high eps_clip_high clip_higher clip_high",
    "objective.dual_clip (with objective=grpo)": "clip_ratio_c dual_clip",
    "objective": (
        "importance_sampling_level loss_mode policy_loss loss algorithm algo loss_fn method"
    ),
    "advantage": (
        "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo estimator"
    ),
    "advantage.lam (with advantage=gae)": "lam lambd gae_lambda",
    "advantage.gamma (with advantage=gae)": "gamma discount",
    "correction": (
        "tis importance_sampling_correction vllm_importance_sampling_correction rollout_is icepop"
    ),
    "correction.high (with correction=tis)": (
        "tis_imp_ratio_cap vllm_importance_sampling_cap rollout_is_threshold tis_cap"
    ),
    "correction.delta (with correction=opsm)": "off_policy_mask_threshold opsm_delta",
    "correction.threshold (with correction=m2po)": "m2_threshold",
    "correction.mask_high (with correction=rho)": "rho_mask_upper_bound",
    "objective.beta (with objective=dro)": "dro_beta",
    "objective.power (with objective=ctpo_la)": "clip_ratio_la_power",
    "objective.delta_high (with objective=prime_rl)": "dppo_mask_high",
    "objective.delta_low (with objective=prime_rl)": "dppo_mask_low",
    "objective.k_positive (with objective=vespo)": "vespo_k_pos",
    "policy.routing_replay": (
        "routing_replay router_replay moe_routing_replay enable_rollout_routing_replay r3 r2"
    ),
    "policy.precision": "bf16 fp16 dtype torch_dtype precision model_dtype",
    "policy.device": "device use_cpu",
    "policy.checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing"
    ),
    "policy.lora.rank": "lora_rank lora_r r use_peft lora rank",
    "policy.lora.alpha": "lora_alpha alpha",
    "policy.lora.targets": "lora_target_modules target_modules",
    "model.path (with model=hf)": (
        "model_name_or_path model_name model_path pretrain pretrained hf_model actor_model "
        "model_id"
    ),
    "model.attention (with model=hf)": "attn_implementation attn_impl flash_attn attention",
    "task.train_path (with task=rows)": (
        "dataset dataset_name data_path train_files train_file prompt_data train_data data"
    ),
    "task.path (with task=rows)": "val_files val_file eval_dataset test_files eval_data val_data",
    "task.columns.prompt (with task=rows)": "prompt_key input_key prompt_column",
    "task.reward (with task=rows)": (
        "reward_funcs reward_func reward_fn reward_function custom_reward_function reward_model "
        "remote_rm_url custom_reward_function.path custom_reward_function.name"
    ),
    "reward.truncated": "truncated_reward",
    "reward.weights": "reward_weights gdpo_reward_weights",
    "prompt.system": "system_prompt system_message system",
    "prompt.thinking": "enable_thinking thinking",
    "steps": (
        "max_steps total_steps num_train_steps total_training_steps num_train_epochs total_epochs "
        "num_episodes num_steps training_steps epochs max_train_steps iterations"
    ),
    "seed": "random_seed data_seed",
    "runs": "output_dir save_path default_local_dir logging_dir out save_dir output",
    "study": "run_name experiment_name wandb_run_name name exp_name group wandb_group",
    "resume": "resume_from_checkpoint resume_from load_checkpoint_path resume_mode load",
    "checkpoint.every": "save_steps save_freq save_interval save_every checkpoint_every",
    "checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep keep_last",
    "evaluation.every": "eval_steps test_freq eval_interval eval_every eval_freq val_interval",
    "evaluation.samples": "eval_n eval_samples n_samples_per_eval_prompt",
    "tracking.wandb": "report_to use_wandb wandb logger wandb_mode mode",
    "tracking.project": "wandb_project project_name project",
    "tracking.entity": "wandb_entity entity wandb_org",
    "tracking.tensorboard": "tensorboard use_tensorboard",
    "parallel.ranks": "nproc_per_node num_gpus n_gpus_per_node num_processes world_size gpus ngpus",
    "parallel.mode": "fsdp deepspeed zero_stage strategy sharding_strategy distributed",
    "threads": "num_threads omp_num_threads",
}  # fmt: skip
# By group: other names of our options.
OPTIONS = {
    "advantage": {
        "grpo": "group_normalized", "grpo_vectorized": "group_normalized",
        "group_norm": "group_normalized", "dr_grpo": "group_mean", "drgrpo": "group_mean",
        "grpo_no_std": "group_mean", "reinforce_plus_plus": "reinforce_pp",
        "reinforce++": "reinforce_pp", "ppo": "gae", "max_rl": "maxrl",
        "normalize_then_sum": "gdpo", "optimal_token_baseline": "otb_verl_columns",
        "tir_optimal_token_baseline": "otb", "negative": "nsr", "positive": "psr",
    },
    "objective": {
        "dr_grpo": "drgrpo", "bnpo": "dapo", "reinforce_plus_plus": "reinforce", "vanilla": "grpo",
    },
    "rollout": {
        "hf": "local", "vllm_colocate": "vllm_same_gpu", "colocate": "vllm_same_gpu",
        "server": "vllm_server",
    },
}  # fmt: skip
THEIRS = {name: ours for ours, names in OURS.items() for name in names.split()}


def our_name(key: str) -> str:
    """Return our setting for the dotted name of another framework, "" for an unknown name.

    Case does not matter, nor whether words are joined by - or _.

    >>> our_name("actor_rollout_ref.actor.optim.lr"), our_name("--Learning-Rate"), our_name("none")
    ('optim.lr', 'optim.lr', '')
    """
    plain = key.strip("-+~").lower().replace("-", "_")
    return THEIRS.get(plain) or THEIRS.get(plain.rpartition(".")[2], "")


def our_option(group: str, option: str) -> str:
    """Return our name for another framework's option, or ""."""
    return OPTIONS.get(group, {}).get(option.lower().replace("-", "_"), "")
