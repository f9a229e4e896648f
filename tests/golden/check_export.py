#!/usr/bin/env python3
"""Models of transformers into the trainer and back: the same logits, the same state dict.

    make build/train_llama
    python3 tests/golden/check_export.py build/train_llama [--keep DIR] [NAME...]

Needs torch and transformers (4.51 or later; 5 too); runs on the CPU in about a minute. For each of
a few small models of every family that the trainer knows, transformers makes random weights and
saves them; the trainer starts from that directory, takes one step with a learning rate of 0, so
that no weight changes, and exports; AutoModelForCausalLM loads the export. Then

    the names of the state dict are the same, each weight is the same to the bit (of a bf16 export:
    the original rounded to bf16), and so the logits are those of the original to 1e-6 of their
    norm (of a bf16 export: those of the original with rounded weights), also beyond position 20;
    the config means the same; the tokenizer's files came along; a tied head is not saved twice.

Sources are saved in fp32, bf16 and fp16, in one file and in several; exports too; the trainer runs
on one rank, on 2 dp ranks with ZeRO-3, and cut over tp and pp. A second kind of check: a model that
the trainer began from random weights and trained for some steps loads, and has the trainer's loss.

One line a check; last line: "N passed, N failed".
"""

import argparse
import glob
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open

TOKENS = 48
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}

# name: (model_type, rope_theta, rope_scaling, other keys)
MODELS = {
    "llama": ("llama", 10000.0, None, dict(num_key_value_heads=4)),
    "llama-3.1": ("llama", 500000.0, LLAMA3, dict(
        num_key_value_heads=2, bos_token_id=1, eos_token_id=[2, 3], rms_norm_eps=1e-5)),
    "llama-tied": ("llama", 100000.0, None, dict(
        num_key_value_heads=2, tie_word_embeddings=True, head_dim=32)),
    "llama-biases": ("llama", 10000.0, None, dict(
        num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", 1000000.0, None, dict(num_key_value_heads=2, sliding_window=None)),
    "mistral-window": ("mistral", 10000.0, None, dict(num_key_value_heads=2, sliding_window=64)),
    "qwen2": ("qwen2", 1000000.0, None, dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2-untied": ("qwen2", 1000000.0, None, dict(num_key_value_heads=4)),
    "qwen3": ("qwen3", 1000000.0, None, dict(num_key_value_heads=2, head_dim=16)),
    "qwen3-tied": ("qwen3", 1000000.0, None, dict(
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)),
}

# dtype of the source, its largest file; of the export, its largest file; layout of the trainer
WAYS = [
    ("float32", "5GB", "fp32", "5000000000", []),
    ("float32", "60KB", "fp32", "60000", ["--dp", "2", "--zero-stage", "3"]),
    ("float32", "5GB", "bf16", "60000", ["--tp", "2", "--pp", "2"]),
    ("bfloat16", "60KB", "bf16", "5000000000", ["--dp", "2", "--zero-stage", "1", "--pp", "2"]),
    ("float16", "5GB", "fp32", "5000000000", ["--tp", "2", "--sp", "--dtype", "bf16"]),
]

passed = failed = 0


def report(name, wrong):
    global passed, failed
    if wrong:
        failed += 1
        print(f"FAIL {name}: {wrong}", flush=True)
    else:
        passed += 1
        print(f"ok   {name}", flush=True)


def make_config(model_type, theta, scaling, keys):
    """The config in the layout of the transformers at hand: rope settings moved in version 5."""
    rope = {}
    if int(transformers.__version__.split(".")[0]) >= 5:
        rope["rope_parameters"] = dict(scaling or {"rope_type": "default"}, rope_theta=theta)
    else:
        rope["rope_theta"] = theta
        if scaling:
            rope["rope_scaling"] = dict(scaling)
    sizes = dict(vocab_size=259, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                 intermediate_size=112, max_position_embeddings=256, tie_word_embeddings=False)
    return transformers.AutoConfig.for_model(model_type, **{**sizes, **keys, **rope})


def make_model(config, seed):
    """Random weights; norms off 1 and biases off 0, so that both matter."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim >= 2:
                p.copy_(0.08 * noise)
            elif name.endswith(".bias"):
                p.copy_(0.1 * noise)
            else:
                p.copy_(1 + 0.1 * noise)
    return model


def load(directory):
    """As a user would, in the dtype that the config says."""
    auto = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, **{auto: "auto"})
    info = info if isinstance(info, dict) else vars(info)
    wrong = {key: list(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
             if info.get(key)}
    return model.eval(), wrong


def logits_of(model, ids):
    """Of its config and weights in float64: a model that was cast has cast its rotary frequencies
    too, and would be another one."""
    fresh = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    fresh = fresh.to(torch.float32).eval()
    fresh.load_state_dict({k: v.to(torch.float32) for k, v in model.state_dict().items()})
    with torch.no_grad():
        return fresh.to(torch.float64)(input_ids=ids).logits


def names_in_files(directory):
    names = []
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        with safe_open(path, "pt") as f:
            names += list(f.keys())
    return names


def run_trainer(trainer, words):
    """What the trainer prints, or an exception with its error line."""
    done = subprocess.run([trainer] + words, capture_output=True, text=True, timeout=600,
                          check=False)
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip() or done.stdout[-300:]}")
    return done.stdout


def compare_weights(original, result, rounded):
    mine, theirs = result.state_dict(), original.state_dict()
    if sorted(mine) != sorted(theirs):
        return f"state dicts differ by {sorted(set(mine) ^ set(theirs))[:4]}"
    for key, value in theirs.items():
        wanted = value.to(torch.bfloat16) if rounded else value
        if mine[key].shape != wanted.shape:
            return f"{key} is {tuple(mine[key].shape)}, not {tuple(wanted.shape)}"
        if not torch.equal(mine[key].float(), wanted.float()):
            return f"{key} differs by {(mine[key].float() - wanted.float()).abs().max().item():g}"
    return None


def compare_configs(a, b):
    """Keys of which the export must keep the meaning, whatever the version calls them."""
    for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "head_dim",
                "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps",
                "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id",
                "sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "layer_types",
                "attention_bias", "mlp_bias", "initializer_range", "hidden_act"):
        x, y = getattr(a, key, None), getattr(b, key, None)
        if isinstance(x, dict) and isinstance(y, dict):
            x = {k: v for k, v in x.items() if k != "type" and v is not None}
            y = {k: v for k, v in y.items() if k != "type" and v is not None}
        if key == "rope_scaling" and (x or {}).get("rope_type") == "default" and y is None:
            continue
        if key == "head_dim" and (x is None or y is None):
            continue
        if x != y:
            return f"config: {key} is {y!r}, not {x!r}"
    return None


def check_way(trainer, folder, data, name, way):
    model_type, theta, scaling, keys = MODELS[name]
    dtype, source_shard, export_dtype, export_shard, layout = way
    config = make_config(model_type, theta, scaling, keys)
    original = make_model(config, seed=1).to(getattr(torch, dtype))
    source, target = os.path.join(folder, "source"), os.path.join(folder, "export")
    for path in (source, target):
        shutil.rmtree(path, ignore_errors=True)
    original.save_pretrained(source, max_shard_size=source_shard)
    with open(os.path.join(source, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        f.write('{"model_max_length": 256}')
    shards = len(glob.glob(os.path.join(source, "*.safetensors")))
    if (shards > 1) != (source_shard != "5GB"):
        return f"transformers saved {shards} files: the check does not check what it should"
    run_trainer(trainer, ["--init-from", source, "--export", target, "--export-dtype", export_dtype,
                          "--export-shard-bytes", export_shard, "--lr", "0", "--steps", "1",
                          "--data", data, "--seq-len", str(TOKENS), "--micro-batch-size", "2",
                          "--device", "cpu"] + layout)
    result, wrong = load(target)
    if wrong:
        return f"from_pretrained: {wrong}"
    if result.dtype != (torch.bfloat16 if export_dtype == "bf16" else torch.float32):
        return f"loaded as {result.dtype}"
    rounded = export_dtype == "bf16"
    bad = compare_weights(original, result, rounded) or compare_configs(original.config,
                                                                       result.config)
    if bad:
        return bad
    names = names_in_files(target)
    if len(names) != len(set(names)):
        return "a tensor is saved twice"
    if config.tie_word_embeddings == ("lm_head.weight" in names):
        return "lm_head.weight " + ("is saved although it is tied" if config.tie_word_embeddings
                                    else "is not saved")
    if not os.path.exists(os.path.join(target, "tokenizer_config.json")):
        return "the tokenizer's files are missing"
    index = os.path.join(target, "model.safetensors.index.json")
    if os.path.exists(index) != (export_shard == "60000"):
        return "one file or several: not as asked"
    if os.path.exists(index):
        with open(index, encoding="utf-8") as f:
            total = json.load(f)["metadata"]["total_size"]
        if total != sum(p.numel() * p.element_size() for p in result.parameters()):
            return f"total_size is {total}"
    ids = torch.randint(0, config.vocab_size, (2, TOKENS),
                        generator=torch.Generator().manual_seed(2))
    reference = original.to(torch.bfloat16) if rounded else original
    a, b = logits_of(reference, ids), logits_of(result, ids)
    error = ((a - b).norm() / a.norm()).item()
    later = ((a - b)[:, 20:].norm() / a[:, 20:].norm()).item()
    if not (error < 1e-6 and later < 1e-6):
        return f"logits differ by {error:g}, beyond position 20 by {later:g}"
    return None


def check_trained(trainer, folder, data, words):
    """A model that the trainer made: transformers finds the loss that the trainer reports."""
    target = os.path.join(folder, "trained")
    shutil.rmtree(target, ignore_errors=True)
    text = run_trainer(trainer, words + [
        "--export", target, "--steps", "6", "--lr", "0.003", "--data", data, "--eval-data", data,
        "--seq-len", str(TOKENS), "--micro-batch-size", "4", "--device", "cpu"])
    loss = float(re.search(r"^validation loss ([0-9.]+)$", text, re.MULTILINE).group(1))
    model, wrong = load(target)
    if wrong:
        return f"from_pretrained: {wrong}"
    with open(data, "rb") as f:
        tokens = torch.tensor(list(f.read()))
    windows = (len(tokens) - 1) // TOKENS
    rows = torch.stack([tokens[i * TOKENS:i * TOKENS + TOKENS + 1] for i in range(windows)])
    logits = logits_of(model, rows[:, :-1])
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1),
                                               rows[:, 1:].flatten()).item()
    if not math.isclose(theirs, loss, abs_tol=1e-4):
        return f"loss {theirs:.5f}, the trainer says {loss:.4f}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trainer", help="the program: build/train_llama, built with cJSON")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to check; default: all")
    parser.add_argument("--keep", metavar="DIR", help="work there, and leave the files")
    args = parser.parse_args()
    unknown = [n for n in args.names if n not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]}; there are: {', '.join(MODELS)}")
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    folder = args.keep or tempfile.mkdtemp(prefix="check_export.")
    os.makedirs(folder, exist_ok=True)
    trainer = os.path.abspath(args.trainer)
    data = os.path.join(folder, "data.txt")
    with open(data, "w", encoding="ascii") as f:
        f.writelines(f"the number {i} is followed by {i + 1}, said the ant\n" for i in range(40))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    checks = []
    for name in args.names or MODELS:
        for way in WAYS:
            label = f"{name}: {way[0]} {way[1]} -> {way[2]} {' '.join(way[4])}".rstrip()
            checks.append((label, check_way, (name, way)))
    small = ["--hidden", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    for extra in ([], ["--tie-embeddings"], ["--qkv-bias"], ["--qk-norm", "--head-dim", "32"],
                  ["--tie-embeddings", "--pp", "2"], ["--tp", "2", "--dp", "2"]):
        checks.append(("trained " + " ".join(extra), check_trained, (small + extra,)))
    try:
        for label, check, rest in checks:
            try:
                report(label, check(trainer, folder, data, *rest))
            except Exception as error:  # pylint: disable=broad-except
                report(label, f"{type(error).__name__}: {error}")
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
