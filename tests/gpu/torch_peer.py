#!/usr/bin/env python3
"""The PyTorch side of what is compared on a GPU.

    torch_peer.py same DIR [--steps 1000]      weights and batches into DIR, then trains on them
    torch_peer.py bench 1b|73m [--mbs 4] [--seq 4096] [--steps 10]
    torchrun --nproc-per-node N torch_peer.py fsdp 1b|8b [--mbs 4] [--seq 4096] [--steps 10]
                                                   [--masters]

same: fp32 master weights and bf16 autocast, AdamW, the same data, order and learning rates as
train_same.c. bench: bf16 weights, every decoder layer compiled, SDPA with all of its kernels
allowed, fused AdamW: tokens/s (median step) and peak memory. fsdp: the same under FSDP2, every
layer a unit, all in bf16; with --masters weights, their gradients and moments are fp32, gathered
and used in bf16.
"""

import argparse
import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "same": dict(vocab_size=256, hidden_size=384, num_hidden_layers=6, num_attention_heads=6,
                 num_key_value_heads=2, intermediate_size=1024, rms_norm_eps=1e-5,
                 tie_word_embeddings=False),
    "1b": dict(vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, intermediate_size=8192, rms_norm_eps=1e-5,
               tie_word_embeddings=True),
    "8b": dict(vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=8, intermediate_size=14336, rms_norm_eps=1e-5,
               tie_word_embeddings=False),
    "73m": dict(vocab_size=1024, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16,
                num_key_value_heads=4, intermediate_size=2048, rms_norm_eps=1e-5,
                tie_word_embeddings=False),
}


def build(shape, seq, dtype):
    keys = dict(SHAPES[shape], max_position_embeddings=max(seq, 64), use_cache=False)
    if int(transformers.__version__.split(".")[0]) >= 5:
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    else:
        keys["rope_theta"] = 10000.0
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**keys), attn_implementation="sdpa",
                                              dtype=dtype)
    return model.train()


def groups(model, decay):
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


def learning_rate(step, total, peak=1e-3, floor=1e-4, warmup=50):
    if step < warmup:
        return peak * (step + 1) / warmup
    x = (min(step, total) - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * x))


def corpus():
    """Bytes of this repository's own text."""
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    text = b""
    for folder in (".", "examples", "tests"):
        for name in sorted(os.listdir(os.path.join(here, folder))):
            if name.endswith((".h", ".c", ".md")):
                with open(os.path.join(here, folder, name), "rb") as file:
                    text += file.read()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int32)


def same(args):
    from safetensors.torch import save_file
    B, T = 16, 256
    model = build("same", T, torch.float32)
    save_file({n: p.detach().cpu().contiguous() for n, p in model.named_parameters()},
              os.path.join(args.dir, "weights.safetensors"))
    text = corpus()
    generator = torch.Generator().manual_seed(2)
    starts = torch.randint(0, len(text) - T - 1, (args.steps, B), generator=generator)
    rows = torch.stack([torch.stack([text[s:s + T + 1] for s in step]) for step in starts.tolist()])
    rows.numpy().tofile(os.path.join(args.dir, "batches.bin"))
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                                  fused=True)
    losses = []
    for step in range(args.steps):
        batch = rows[step].long().cuda()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()
    print("mean of the last 50: %.5f" % (sum(losses[-50:]) / 50))


def timed_steps(args, model, optimizer, wait):
    """Tokens/s of the median step after three."""
    vocab = SHAPES[args.shape]["vocab_size"]
    batch = torch.randint(0, vocab, (args.mbs, args.seq + 1), device="cuda")
    times = []
    for step in range(args.steps + 3):
        wait()
        begin = time.perf_counter()
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= 3:
            times.append(time.perf_counter() - begin)
    return args.mbs * args.seq / statistics.median(times)


def bench(args):
    model = build(args.shape, args.seq, torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    rate = timed_steps(args, model, optimizer, torch.cuda.synchronize)
    print("torch %s mbs %d x %d: %.0f tok/s, peak %.0f MiB" % (
        args.shape, args.mbs, args.seq, rate, torch.cuda.max_memory_allocated() / 2**20))


def fsdp(args):
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    model = build(args.shape, args.seq, torch.float32 if args.masters else torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)
        fully_shard(model.model.layers[i], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def wait():
        torch.cuda.synchronize()
        dist.barrier()

    rate = timed_steps(args, model, optimizer, wait)
    if rank == 0:
        print("torch FSDP2 %s%s mbs %d x %d: %.0f tok/s a GPU, peak %.0f MiB" % (
            args.shape, ", fp32 masters," if args.masters else "", args.mbs, args.seq, rate,
            torch.cuda.max_memory_allocated() / 2**20), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("same")
    one.add_argument("dir")
    one.add_argument("--steps", type=int, default=1000)
    one.set_defaults(run=same)
    two = parts.add_parser("bench")
    two.add_argument("shape", choices=["1b", "73m"])
    two.add_argument("--mbs", type=int, default=4)
    two.add_argument("--seq", type=int, default=4096)
    two.add_argument("--steps", type=int, default=10)
    two.set_defaults(run=bench)
    three = parts.add_parser("fsdp")
    three.add_argument("shape", choices=["1b", "8b"])
    three.add_argument("--mbs", type=int, default=4)
    three.add_argument("--seq", type=int, default=4096)
    three.add_argument("--steps", type=int, default=10)
    three.add_argument("--masters", action="store_true")
    three.set_defaults(run=fsdp)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
