"""Keys of other training tools with their names here; used in error messages."""

from __future__ import annotations

_KEYS_BY_ANSWER = {
    "write 'train.recompute: block' for true, and 'none' for false": "gradient_checkpointing",
    "write 'model.id' for a whole model, or 'model.language_model.id' for a part": (
        "model_name_or_path model_id base_model model_path"
    ),
    "write 'model.freeze: [vision.encoder]'": (
        "freeze_vision_tower freeze_vit freeze_vision_model freeze_vision_encoder"
    ),
    "write 'model.freeze: [vision.projector]'": (
        "freeze_multi_modal_projector freeze_aligner freeze_merger freeze_mm_mlp_adapter"
    ),
    "write 'model.freeze: [language]'": "freeze_language_model freeze_llm",
    "write 'model.processor: {min_pixels: ..., max_pixels: ...}'": (
        "max_pixels min_pixels image_max_pixels image_min_pixels"
    ),
    "write 'model.processor: {fps: ..., max_frames: ..., video_max_pixels: ...}'": (
        "video_max_pixels video_min_pixels video_fps video_maxlen fps max_frames"
    ),
    "write 'model.lora.r'": "lora_rank lora_r rank",
    "write 'model.lora.load_in_4bit: true'": "load_in_4bit quantization_bit quant_bits bnb_4bit_quant_type",
    "write 'model.lora.use_dora: true'": "use_dora",
    "write 'model.lora.target_modules'": "lora_target lora_target_modules",
    "write 'model.lora: {}' for LoRA": "finetuning_type train_type tuner_type use_peft use_lora",
    "write 'model.lora.train: [vision.projector]'": "modules_to_save additional_target",
    "write 'parallel.units.UNIT.tp'": "tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "write 'parallel.units.UNIT.pp'": (
        "pp_size pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree"
    ),
    "write 'parallel.units.UNIT.cp'": (
        "cp_size context_parallel_size sequence_parallel_size context_parallel_degree ulysses_size"
    ),
    "write 'parallel.units.UNIT.replicas'": "dp_size data_parallel_size data_parallel_replicate_degree",
    "write 'train.global_batch_size': samples of a step over all devices": (
        "per_device_train_batch_size train_batch_size"
    ),
    "a step is cut into 'parallel.microbatches', or by 'train.row_tokens'": (
        "gradient_accumulation_steps micro_batch_size microbatch_size local_batch_size"
    ),
    "write 'parallel.units.UNIT.ep'": "ep_size expert_parallel_degree expert_model_parallel_size",
    "write 'parallel.units.UNIT.chunks'": "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size",
    "write 'train.recompute: block', or 'none'": "activation_checkpoint activation_checkpointing recompute_granularity",
    "degrees are in 'parallel.units.UNIT.tp' and the like, batches in 'train', lengths in 'data'": (
        "parallelism training"
    ),
    "write 'media_dir' of the data source: the folder that relative paths of media start from": (
        "image_folder image_dir image_root images_root video_folder media_root root root_dir"
    ),
    "write 'train.preferences: {method: dpo}'": "rlhf_type pref_loss dpo_loss loss_type",
    "write 'train.preferences.beta'": "pref_beta dpo_beta",
    "write 'train.preferences.gamma'": "simpo_gamma",
    "write 'train.preferences.sft_weight'": "pref_ftx rpo_alpha",
    "write 'train.preferences.desirable_weight'": "kto_chosen_weight",
    "write 'train.preferences.undesirable_weight'": "kto_rejected_weight",
    "the reference is the model that the run starts from: delete the key": "ref_model ref_model_name_or_path",
    "write 'train.epochs'": "num_train_epochs num_epochs",
    "write 'train.steps'": "max_steps train_iters",
    "write 'data.max_length'": "cutoff_len max_seq_length max_seq_len model_max_length seq_len seq_length",
    "write 'train.precision: bf16' or 'fp32'": "bf16 fp16 mixed_precision torch_dtype",
    "write 'train.zero', who shares optimizer state, and 'train.shard', whether also gradients and weights": (
        "deepspeed zero_stage fsdp fsdp_config data_parallel_shard_degree"
    ),
    "write 'parallel.timeout_seconds'": "ddp_timeout",
    "samples are always packed, without reaching each other": "packing neat_packing sample_packing padding_free",
    "write 'train.optimizer.learning_rate', or its 'groups'": "vit_lr vision_lr",
    "write 'train.optimizer.groups'": "mm_projector_lr aligner_lr merger_lr",
    "write 'train.schedule.kind'": "lr_scheduler_type",
    "write 'train.schedule.final_ratio': the lowest learning rate as a share of the peak": (
        "min_lr min_lr_ratio min_lr_rate cosine_min_lr_ratio lr_scheduler_kwargs"
    ),
    "write 'train.label_smoothing'": "label_smoothing_factor",
    "write 'train.neftune_noise_alpha'": "neftune_alpha noise_alpha",
    "write 'data.system'": "default_system system_prompt",
    "write 'train.optimizer.eps'": "adam_epsilon",
    "write 'train.optimizer.name: adamw' or 'adamw_8bit'": "optim optimizer_type",
    "write 'train.optimizer.groups: {\"*.lora_B.*\": {learning_rate: ...}}'": "loraplus_lr_ratio lorap_lr_ratio",
    "start from what peft makes of it (docs/models.md, PiSSA)": "pissa_init init_lora_weights init_weights",
    "write 'train.keep_checkpoints'": "save_total_limit",
    "write 'train.resume'": "resume_from_checkpoint",
    "write 'evaluation.steps'": "eval_steps",
    "write 'data.val_size'": "split_dataset_ratio val_set_size test_size",
    "write 'data.max_samples'": "max_train_samples num_samples",
    "write 'evaluation.limit'": "max_eval_samples",
    "write 'data.truncation: right' to cut samples, or 'error'": "truncation_strategy truncation_side",
    "write 'evaluation.keep_best: loss'": "load_best_model_at_end metric_for_best_model",
    "write 'evaluation.mode: max' or 'min'": "greater_is_better",
    "write 'evaluation.keep_best' and 'evaluation.patience'": "early_stopping_patience early_stopping_steps",
    "write 'evaluation.min_delta'": "early_stopping_threshold",
    "write 'evaluation.metrics'": "compute_metrics metric eval_metric",
    "write 'data.eval: [{path: ...}]'": "eval_dataset val_dataset eval_data_path",
    "write 'train.optimizer.ema: 0.999'": "ema_decay use_ema",
    "write 'model.attn_implementation'": "flash_attn attn_impl",
    "write 'data.train: [{path: ...}]' or '[{id: ...}]'": "dataset dataset_path data_path",
    "write 'data.chat_template'": "template",
}

CALLED_HERE = {key: answer for answer, keys in _KEYS_BY_ANSWER.items() for key in keys.split()}
