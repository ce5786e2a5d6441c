"""Why predictions of some published rows are far from their measurement (the row, the program that ran, or the model),
and how far they once were."""

from __future__ import annotations

REASONS = (
    "bloom-prequel (the row): one layout was timed up to three times and differs by 6 %, and tp 4 with microbatches "
    "of one sample takes 148 s where two take 104 s. Heads of 128 numbers are 15 % slower than wider and narrower "
    "ones in three sets (12, 14 and 26 heads a rank) and not in a fourth, whose products of attention are those of "
    "the second (56 of 2,048 x 2,048 x 128), all in its fused softmax: no shape explains them. Without these 4 rows: "
    "3.6 %, worst 15 %. tp 8 (us): with microbatches of one and two samples 9 % too fast, with four right.",
    "nanotron-ultrascale, contradicted (the row): another row on the same layout, whose microbatches are no larger, "
    "takes less than 1/1.6 of the time, bubbles aside, often 1/5: a block takes 45 ms and more, whatever the model "
    "and the microbatch. The source mixes two implementations and does not say which row is whose. 49 more rows "
    "without such a neighbour take more than 1.6 times their prediction (19 of them held out, which is 8.8 % without "
    "them). 64 replicas and more (the row and us, 76 rows): copies of gathered slices explain most of what the 1B and"
    " 8B lack; of the 16 rows that were held out half take nearly twice their prediction; without them 10.8 % held "
    "out.",
    "nanotron-ultrascale, its gathers of new weights (28 November): fitted to its 1B and 8B, from 13.6 to 12.7 % held"
    " out; median regret 1.04 to 1.02. Its sums in pipelines without ZeRO, likewise: the best of ours is among the "
    "first three in 0.77 of the sets, from 0.64. Where it is not, the chosen row often takes three times as long as "
    "predicted, as a contradicted one does, or one whose memory is nearly full (8B on 8 and 16 GPUs in two stages, "
    "80B in eight).",
    "fms-fsdp on A100 (us): 11 % slow at 70B, whose compiled products of 2024 reach 0.87 of an A100's peak; 0.8 is "
    "that of InternEvo in 2023. How many blocks recompute is not told: as few as fit 0.9 of the memory. Without this "
    "run: 3.6 %.",
    "internevo, 512 and 1,024 GPUs with one or two microbatches (the row, 8 rows): on 512 GPUs steps of four and two "
    "microbatches took 4.20 and 2.66 s, so that the two more took 0.77 s each, on 1,024 GPUs 0.81 s, where one takes "
    "1.0 s on 8 GPUs: no time per step meets both. Without them: 2.1 %, worst 6 %. That its last bucket is summed "
    "alone brought 3.8 to 3.6 % (28 November).",
    "llm-foundry, 30B with 8,192 tokens on 8 GPUs (the row): 2.6 times as long as with 4,096, where others take 2.2. "
    "Without it: 2.3 %, worst 8 %. Norms in bf16, as MPT's are under autocast, and recomputation that stops before a "
    "block's last product, as PyTorch's, moved H100's bf16 products from 0.73 to 0.65 of the peak (28 November): "
    "llm-foundry from 3.4 to 2.6 %, torchtitan from 2.0 to 1.2 %, fms-fsdp from 6.5 to 4.5 %, three layouts of Llama 3 "
    "405B from 0.91 to 0.97 of their time to 0.99 to 1.04.",
    "torchtitan, scales by rows (the program, 4 rows): its products are CUTLASS's, and what was gathered in bf16 is "
    "cast by each rank. Both, from measurements elsewhere, brought 29 to 14 % on these rows; its maintainers call "
    "them slow for tensor parallelism, with products that still gain (torchtitan issue 1207). Context parallelism "
    "with 128k and 256k tokens (the row, 2 rows): from 64k tokens on two GPUs to 128k on four a GPU's speed falls to "
    "1/2.37, where twice the pairs a token allow 1/2 at worst; of a 405B in the same tables it falls to 1/1.5. "
    "Messages of its ring run beside its kernels, its merges in fp32 are 2 % of a step. Without these 6 rows: 4.1 %, "
    "worst 14 %; all were 12.4 % before 28 November, 8.1 % before recomputation stopped early.",
    "megatron-bridge-summary, experts (the program): Qwen3 30B on 8 GB300 with one layout took 9.1, 8.3 and 5.9 s in "
    "releases 25.11, 26.04 and 26.06, and a block of eager ones takes 9.3 ms however few tokens it has. Moonlight "
    "(bridge-skills) was timed in steps of one microbatch, whose host work outside blocks (a copy of each weight and "
    "gradient by itself) and in latent attention is not modelled. Recipes of each release, in the repository's "
    "history, tell CUDA graphs, dispatchers and what is taken apart (28 November): FP8 from 14.6 to 11.7 % held out, "
    "rows of 25.09, which drop tokens, from 23 to 14 %. Qwen3 235B on H100 (us, 5 rows), whose blocks are taken apart"
    " to run beside exchanges, is 27 % too slow where it was 28 % too fast: hosts need 13 ms a block there, 16 on "
    "B300, as fitted to Qwen3 30B. Rows in 16 bits without the 24 of GPT OSS: 3.3 %; in FP8 without GPT OSS (7) and "
    "Qwen3 235B on H100 and B300: 7.9 %.",
    "GPT OSS (the program and us): experts' biases and clamps, operation by operation in its layers, and copies of a "
    "token for each expert explain 0.15 microseconds a token and block on GB200, 0.3 on H100; that ranks with equal "
    "experts are a node apart, 8 % of a step on B200. This brought 16 bits from 34.3 to 25.6 %. Gradients of biases "
    "inside products, at the one speed that somebody published (on A100), brought 25.6 to 17.6 % (28 November). What "
    "was left before grew neither with rows, so it is not attention, nor with memory's slowness, so it is not "
    "traffic: on five GPUs it was 1.1 to 1.5 times the time of experts' products. 0.4 a token and block on GB200 and "
    "0.7 on H100 are left. One layout in MXFP8 on GB200 took 2.8, 4.5 and 2.9 s in releases 26.06, 26.06.01 and 26.08"
    " (the row).",
    "nemo-24.07: fine-tuning of 13B and 70B has the virtual stages of its scripts, which its table leaves out; with "
    "gradients in 16 bits and tensor-parallel collectives beside products, as they set, 9.5 became 7.7 %, worst 25 "
    "became 12 %; with the speed of products in FP8, delayed scales and gathers in eight bits (28 November) 6.1 %, "
    "worst 15 %: GPT-3 175B (us), whose collectives are not beside products by its scripts, 13 % too slow.",
    "megatron-bridge-summary, FP8 (the row): 70B on GB300 with pp 4 and microbatches of two samples mixes two "
    "recipes, of whole replicas with two samples, and of pp 4 in five chunks with one; in chunks it would be 3 % too "
    "long.",
    "megatron-bridge-summary, FP8: its recipes run tensor-parallel collectives beside products, except in FP4, and "
    "send gradients in 16 bits (28 November). With both, rows on GB300 went from 8.6 to 5.5 %, those on GB200 and "
    "H100, then 8 and 6 % too fast, from 6.2 to 8.7 and 6.9 %. Products in FP8 reach less of an H100's peak than in "
    "bf16, and on GB200, whose power is not that of its peak, less than on B200, as a public benchmark of products "
    "shows: 8.7 to 5.6 and 6.9 to 2.9 %. MXFP8 reads a number once, but its products are slower, as measured for "
    "Transformer Engine: GB200 5.0, B200 4.3 to 2.8, GB300 5.5 to 6.2 %. All together from 6.9 to 4.7 %, the best of "
    "ours among the first three in all sets from 0.75. 405B on GB200 in 25.09 took 7.1 s where B200 took 6.6 s (the "
    "row). Exponentials at twice the rate (NVIDIA on GB300) are not counted: a third more speed was published for "
    "attention's forward in FP8, blocks attend in bf16.",
    "llm-foundry, FP8: products at the speed of FP8 took 3.5 to 6.1 %, delayed scales, as it uses, back to 4.2 %, "
    "norms in bf16 and casts of weights in each microbatch to 3.3 %, worst 4 % instead of 13.",
    "The pace of the slowest of many devices (28 November) brought bloom-prequel from 4.7 to 4.2 %, internevo from "
    "4.2 to 3.8 %, torchtitan from 2.5 to 2.0 % and FP4 from 7.6 to 7.2 %, and what was too slow before 0.2 to 0.3 % "
    "up.",
    "bridge-cards: its recipes (28 November) brought images from 38.8 to 5 % and images with experts from 40.7 to 24 "
    "%: a further predicted token costs a block and a head over 248,320 words, rows are padded to their full length, "
    "stages are not equal, no sums overlap, and a mixer's host reads lengths back. Two constants are fitted to it. "
    "The tuned row on H100 (the row, 20 % fast): images of any size and unbalanced experts take 1.37 times as long as"
    " the same recipe without, as its card says. GB200, fine-tuned (the row): empties the allocator's cache in each "
    "step, and takes 9.9 s for four microbatches of 4,096 tokens, with adapters 5.5. Without it: 7 % of all six.",
    "Fitted on fms-fsdp alone (the rows): three quarters of its eight runs recompute an unknown part of their blocks,"
    " and traffic is 4 % of a step, so its factors mean nothing elsewhere.",
    "Before attention, elementwise traffic, hosts and updates had terms of their own (25 November), mean distances "
    "were: llm-foundry 24.5 %, torchtitan 34 %, fms-fsdp 10 %, internevo 7.7 %, bloom-prequel 24.7 %, "
    "nanotron-ultrascale, contradicted rows included, 44 %, dense rows in FP8 65 %.",
)
