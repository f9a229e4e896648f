#!/usr/bin/env python3
"""Makes golden files: what Hugging Face transformers computes for a small model, as safetensors.

    python3 make_golden.py llama_gqa                     writes llama_gqa.safetensors here
    python3 make_golden.py --out /tmp --seed 7 all       every config below
    python3 make_golden.py --list

Needs torch, transformers (4.40 or later) and safetensors; runs on the CPU in a few seconds a file.
What a file holds is in README.md. The weights of a model are rounded to float32 first, so that both
sides start from the same numbers; the model then runs in float64. Inside transformers norms,
softmax and rotary tables are float32 all the same, which bounds the agreement at about 1e-7.
"""

import argparse
import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file

STEPS = 20
TRAIN = {
    "optimizer": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
    "decayed": "tensors of 2 dimensions or more", "clip_grad_norm": 1.0, "steps": STEPS,
    "schedule": "constant",
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name: (model_type, batch, tokens, rope_theta, rope_scaling, other keys of the model's config).
# Each is there for one thing that its neighbours lack.
CONFIGS = {
    # grouped kv heads, untied head, an odd vocabulary
    "llama_gqa": ("llama", 2, 32, 10000.0, None, dict(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, rms_norm_eps=1e-5)),
    # tied embeddings, as many kv heads as heads, three of each
    "llama_tied": ("llama", 3, 24, 100000.0, None, dict(
        vocab_size=131, hidden_size=48, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, intermediate_size=96, rms_norm_eps=1e-6,
        tie_word_embeddings=True)),
    # scaled frequencies, beyond the original context; one kv head
    "llama3_rope": ("llama", 1, 128, 500000.0, LLAMA3_ROPE, dict(
        vocab_size=80, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, intermediate_size=112, rms_norm_eps=1e-5,
        tie_word_embeddings=True)),
    # head_dim that is not hidden / heads
    "llama_headdim": ("llama", 2, 20, 10000.0, None, dict(
        vocab_size=64, hidden_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=120, rms_norm_eps=1e-5)),
    # biases on every projection
    "llama_biases": ("llama", 2, 24, 10000.0, None, dict(
        vocab_size=72, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, intermediate_size=104, rms_norm_eps=1e-5, attention_bias=True,
        mlp_bias=True)),
    # biases on q, k and v only
    "qwen2_bias": ("qwen2", 2, 24, 1000000.0, None, dict(
        vocab_size=90, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, rms_norm_eps=1e-6,
        tie_word_embeddings=True)),
    # norms of query and key heads
    "qwen3_qknorm": ("qwen3", 2, 24, 1000000.0, None, dict(
        vocab_size=90, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=128, rms_norm_eps=1e-6)),
    # a third family without biases, whose window is switched off
    "mistral": ("mistral", 2, 28, 10000.0, None, dict(
        vocab_size=85, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=8, intermediate_size=96, rms_norm_eps=1e-5,
        sliding_window=None)),
}


def build_config(model_type, tokens, rope_theta, rope_scaling, keys):
    """The config in the layout of the transformers at hand: rope settings moved in version 5."""
    rope = {}
    if int(transformers.__version__.split(".")[0]) >= 5:
        rope["rope_parameters"] = dict(rope_scaling or {"rope_type": "default"},
                                       rope_theta=rope_theta)
    else:
        rope["rope_theta"] = rope_theta
        if rope_scaling:
            rope["rope_scaling"] = dict(rope_scaling)
    defaults = {"max_position_embeddings": max(64, 4 * tokens), "tie_word_embeddings": False,
                "use_cache": False}
    return transformers.AutoConfig.for_model(model_type, **{**defaults, **keys, **rope})


def build_model(config, generator):
    """Random weights, exact in float32; also norms off 1 and biases off 0, so that both matter."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # a tied head comes once, as the embedding
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.ndim >= 2:
                value = 0.08 * noise
            elif name.endswith(".bias"):
                value = 0.1 * noise
            else:
                value = 1 + 0.1 * noise
            p.copy_(value.float().double())
    return model


def build_batch(vocab, batch, tokens, generator):
    """Rows of tokens + 1 random ids: inputs, and the same one later; every eighth is ignored."""
    rows = torch.randint(0, vocab, (batch, tokens + 1), generator=generator)
    input_ids, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
    ignored = torch.rand(labels.shape, generator=generator) < 0.125
    ignored[0, 0], ignored[-1, -1] = True, False
    labels[ignored] = -100
    return input_ids, labels


def compute_loss(model, input_ids, labels):
    logits = model(input_ids=input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                             ignore_index=-100)
    return logits, loss


def train(model, input_ids, labels):
    """STEPS steps of AdamW on one batch: the losses before, and the norms before clipping."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": TRAIN["weight_decay"]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN["lr"], betas=tuple(TRAIN["betas"]),
                                  eps=TRAIN["eps"], foreach=False)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        _, loss = compute_loss(model, input_ids, labels)
        loss.backward()
        # torch's coefficient is min(1, max_norm / (norm + 1e-6))
        norm = torch.nn.utils.clip_grad_norm_(params, TRAIN["clip_grad_norm"])
        optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    return losses, norms


def f32(tensor):
    return tensor.detach().to(torch.float32).contiguous().clone()


def make(name, seed, out):
    model_type, batch, tokens, theta, scaling, keys = CONFIGS[name]
    generator = torch.Generator().manual_seed(seed)
    config = build_config(model_type, tokens, theta, scaling, keys)
    model = build_model(config, generator)
    input_ids, labels = build_batch(config.vocab_size, batch, tokens, generator)

    tensors = {"input_ids": input_ids, "labels": labels}
    for key, p in model.named_parameters():
        tensors["w/" + key] = f32(p)
    logits, loss = compute_loss(model, input_ids, labels)
    loss.backward()
    tensors["logits"] = f32(logits)
    tensors["loss"] = f32(loss).reshape(1)
    for key, p in model.named_parameters():
        tensors["g/" + key] = f32(p.grad)

    losses, norms = train(model, input_ids, labels)
    if abs(losses[0] - loss.item()) > 1e-12 * abs(losses[0]):
        raise SystemExit(f"{name}: the model is not deterministic: {losses[0]} and {loss.item()}")
    tensors["losses"] = torch.tensor(losses, dtype=torch.float32)
    tensors["grad_norms"] = torch.tensor(norms, dtype=torch.float32)
    for key, p in model.named_parameters():
        if "layers.0." in key or "norm" in key:
            tensors["final/" + key] = f32(p)

    path = os.path.join(out, name + ".safetensors")
    save_file(tensors, path, metadata={
        "config": config.to_json_string(use_diff=False), "train": json.dumps(TRAIN),
        "torch": torch.__version__, "transformers": transformers.__version__})
    print(f"{path}: {len(tensors)} tensors, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
          f"{os.path.getsize(path)} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs by name, or `all`")
    parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)), metavar="DIR",
                        help="where the files go; default: beside this script")
    parser.add_argument("--seed", type=int, default=1, help="of weights and tokens; default 1")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    args = parser.parse_args()
    if args.list:
        print("\n".join(CONFIGS))
        return 0
    names = list(CONFIGS) if args.names == ["all"] else args.names
    unknown = [n for n in names if n not in CONFIGS]
    if unknown or not names:
        parser.error((f"unknown config {unknown[0]}" if unknown else "no config given") +
                     "; there are: " + ", ".join(CONFIGS))
    os.makedirs(args.out, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in names:
        make(name, args.seed, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
