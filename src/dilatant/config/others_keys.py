"""Keys of other training tools, and former keys, with their names here; used in error messages."""

from __future__ import annotations

from collections.abc import Mapping

CALLED_HERE: Mapping[str, str] = {
    "gradient_checkpointing": "write 'train.recompute: block' for true, and 'none' for false",
    **dict.fromkeys(
        ("model_name_or_path", "model_id", "base_model", "model_path"),
        "write 'model.id' for a whole model, or 'model.language_model.id' for a part",
    ),
    **dict.fromkeys(
        ("freeze_vision_tower", "freeze_vit", "freeze_vision_model", "freeze_vision_encoder"),
        "write 'model.freeze: [vision.encoder]'",
    ),
    **dict.fromkeys(
        ("freeze_multi_modal_projector", "freeze_aligner", "freeze_merger", "freeze_mm_mlp_adapter"),
        "write 'model.freeze: [vision.projector]'",
    ),
    **dict.fromkeys(("freeze_language_model", "freeze_llm"), "write 'model.freeze: [language]'"),
    **dict.fromkeys(
        ("max_pixels", "min_pixels", "image_max_pixels", "image_min_pixels"),
        "write 'model.processor: {min_pixels: ..., max_pixels: ...}'",
    ),
    **dict.fromkeys(
        ("video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen", "fps", "max_frames"),
        "write 'model.processor: {fps: ..., max_frames: ..., video_max_pixels: ...}'",
    ),
    **dict.fromkeys(("lora_rank", "lora_r"), "write 'model.lora.r'"),
    **dict.fromkeys(
        ("load_in_4bit", "quantization_bit", "quant_bits", "bnb_4bit_quant_type"),
        "write 'model.lora.load_in_4bit: true'",
    ),
    "use_dora": "write 'model.lora.use_dora: true'",
    **dict.fromkeys(("lora_target", "lora_target_modules"), "write 'model.lora.target_modules'"),
    **dict.fromkeys(
        ("finetuning_type", "train_type", "use_peft", "use_lora"), "write 'model.lora: {}' for LoRA"
    ),
    **dict.fromkeys(("modules_to_save", "additional_target"), "write 'model.lora.train: [vision.projector]'"),
    **dict.fromkeys(
        ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size"), "write 'parallel.units.UNIT.tp'"
    ),
    **dict.fromkeys(
        ("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
        "write 'parallel.units.UNIT.pp'",
    ),
    **dict.fromkeys(
        ("cp_size", "context_parallel_size", "sequence_parallel_size"), "write 'parallel.units.UNIT.cp'"
    ),
    **dict.fromkeys(("dp_size", "data_parallel_size"), "write 'parallel.units.UNIT.replicas'"),
    "per_device_train_batch_size": "write 'train.global_batch_size': samples of a step over all devices",
    "train_batch_size": "write 'train.global_batch_size': samples of a step over all devices",
    "gradient_accumulation_steps": "a step is cut into 'parallel.microbatches', or by 'train.row_tokens'",
    **dict.fromkeys(
        (
            "image_folder",
            "image_dir",
            "image_root",
            "images_root",
            "video_folder",
            "media_root",
            "root",
            "root_dir",
        ),
        "write 'media_dir' of the data source: the folder that relative paths of media start from",
    ),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "write 'train.epochs'"),
    **dict.fromkeys(("max_steps", "train_iters"), "write 'train.steps'"),
    **dict.fromkeys(
        ("cutoff_len", "max_seq_length", "max_seq_len", "model_max_length"), "write 'data.max_length'"
    ),
    **dict.fromkeys(
        ("bf16", "fp16", "mixed_precision", "torch_dtype"), "write 'train.precision: bf16' or 'fp32'"
    ),
    **dict.fromkeys(("deepspeed", "zero_stage", "fsdp"), "write 'train.zero': who shares optimizer state"),
    **dict.fromkeys(("vit_lr", "vision_lr"), "write 'train.optimizer.learning_rate', or its 'groups'"),
    **dict.fromkeys(("mm_projector_lr", "aligner_lr", "merger_lr"), "write 'train.optimizer.groups'"),
    "lr_scheduler_type": "write 'train.schedule.kind'",
    "warmup_ratio": "write 'train.schedule.warmup_steps'",
    "save_total_limit": "write 'train.keep_checkpoints'",
    "resume_from_checkpoint": "write 'train.resume'",
    "eval_steps": "write 'evaluation.steps'",
    **dict.fromkeys(("split_dataset_ratio", "val_set_size", "test_size"), "write 'data.val_size'"),
    **dict.fromkeys(("max_train_samples", "num_samples"), "write 'data.max_samples'"),
    "max_eval_samples": "write 'evaluation.limit'",
    **dict.fromkeys(
        ("truncation_strategy", "truncation_side"),
        "write 'data.truncation: right' to cut samples, or 'error'",
    ),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model"), "write 'evaluation.keep_best: loss'"
    ),
    "greater_is_better": "write 'evaluation.mode: max' or 'min'",
    **dict.fromkeys(
        ("early_stopping_patience", "early_stopping_steps"),
        "write 'evaluation.keep_best' and 'evaluation.patience'",
    ),
    "early_stopping_threshold": "write 'evaluation.min_delta'",
    **dict.fromkeys(("compute_metrics", "metric", "eval_metric"), "write 'evaluation.metrics'"),
    **dict.fromkeys(("eval_dataset", "val_dataset", "eval_data_path"), "write 'data.eval: [{path: ...}]'"),
    **dict.fromkeys(("ema_decay", "use_ema"), "write 'train.optimizer.ema: 0.999'"),
    "flash_attn": "write 'model.attn_implementation'",
    "attn_impl": "write 'model.attn_implementation'",
    **dict.fromkeys(
        ("dataset", "dataset_path", "data_path"), "write 'data.train: [{path: ...}]' or '[{id: ...}]'"
    ),
    "template": "write 'data.chat_template'",
}
