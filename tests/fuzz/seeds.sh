#!/bin/sh
# Writes what the fuzzers begin with: small inputs that are accepted, or nearly so.
#
# usage: tests/fuzz/seeds.sh DIRECTORY      makes DIRECTORY/NAME/* for each tests/fuzz/fuzz_NAME.c
set -eu

for fuzzer in tests/fuzz/fuzz_*.c; do
    name=$(basename "$fuzzer" .c)
    mkdir -p "$1/${name#fuzz_}"
done
cd "$1"

# le BYTES VALUE...: numbers, little-endian, as printf's escapes.
le() {
    width=$1
    shift
    for value in "$@"; do
        i=0
        while [ $i -lt "$width" ]; do
            printf '\\%03o' $((value & 255))
            value=$((value >> 8))
            i=$((i + 1))
        done
    done
}
bytes() { printf "$(le "$@")"; }

# safetensors: the header's length, the header, the data.
tensors() { # HEADER BYTES
    bytes 8 ${#1}
    printf '%s' "$1"
    head -c "$2" /dev/zero
}
tensors '{}' 0 >safetensors/empty
tensors '{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}' 24 >safetensors/one
tensors '{"__metadata__":{"format":"pt","k\u00e4":"v"},
"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},
"b":{"dtype":"I64","shape":[],"data_offsets":[4,12]},
"c":{"dtype":"F4","shape":[4],"data_offsets":[12,14]}}' 14 >safetensors/three
tensors '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},
"b":{"dtype":"BOOL","shape":[1,1,1],"data_offsets":[0,1]}}   ' 1 >safetensors/none

cat >hf_config/llama <<'EOF'
{"model_type":"llama","vocab_size":32,"hidden_size":8,"num_hidden_layers":2,
 "num_attention_heads":2,"intermediate_size":16,"rms_norm_eps":1e-5,"rope_theta":500000.0,
 "tie_word_embeddings":false,"max_position_embeddings":64,"torch_dtype":"bfloat16",
 "rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
 "original_max_position_embeddings":16}}
EOF
cat >hf_config/qwen3 <<'EOF'
{"model_type":"qwen3","vocab_size":32,"hidden_size":8,"num_hidden_layers":1,"head_dim":4,
 "num_attention_heads":2,"num_key_value_heads":1,"intermediate_size":16,"attention_bias":true,
 "rope_parameters":{"rope_theta":1e6,"rope_type":"default"},"layer_types":["full_attention"],
 "eos_token_id":[1,2],"use_sliding_window":false,"sliding_window":null,"hidden_act":"silu"}
EOF
cat >hf_config/mistral <<'EOF'
{"model_type":"mistral","vocab_size":32,"hidden_size":8,"num_hidden_layers":1,
 "num_attention_heads":2,"num_key_value_heads":1,"intermediate_size":16,"sliding_window":null,
 "rope_theta":10000,"attention_dropout":0.0,"quantization_config":null}
EOF

# shards: the kind, then tokens; with llm.c's header of 256 int32.
{ printf '\0'; printf 'some bytes that are text'; } >shards/bytes
{ printf '\1'; bytes 2 1 2 3 4 5 6 7 8 9 10 11 12; } >shards/raw16
{ printf '\2'; bytes 4 1 2 3 65536 4294967295 6 7 8 9 10 11 12; } >shards/raw32
{ printf '\1'; bytes 4 20240520 1 8; head -c 1012 /dev/zero; bytes 2 1 2 3 4 5 6 7 8; } \
    >shards/llmc16
{ printf '\2'; bytes 4 20240801 7 7; head -c 1012 /dev/zero; bytes 4 1 2 3 4 5 6 7; } >shards/llmc32
{ printf '\5'; bytes 2 1 2 3 4 5 6 7 8 9 10 11 12; } >shards/two_files

# json: calls of the emitter.
printf '\005\000key\000\001value\000\000k\000\007\002\000\000\000\000\000\000\370\077' >json/object
printf '\003\232\231\231\231\231\231\271\077\011\012\010\006' >>json/object
printf '\001a "string"\\ \303\244' >json/string
printf '\007\004\000\000\000\000\000\000\010\100\005\006\010' >json/array

cat >config/many <<'EOF'
{"device": "meta", "dp": 2, "sp": false, "sac": "budget=3MiB", "memory-limit": "5GiB",
 "lr": 0.003, "seed": "9223372036854775807", "data": ["a", "b\\c"], "reduce-overlap": true,
 "pp-layers": "1,3", "schedule": "zb-h1", "log": "x", "hash": true, "optimizer": "sgd"}
EOF
printf '{}' >config/empty

printf '{"metadata":{"total_size":8},"weight_map":{"b":"m-1.safetensors","a":"m-2.safetensors"}}' \
    >hf_index/two

hex='"0123456789abcdef"'
part='{"name":"w","shape":[4,4],"runs":[0,2,4,4],"xxh3":['$hex']}'
file='{"rank":0,"name":"a","bytes":100,"header_xxh3":'$hex',"arrays":['$part']}'
other=$(echo "$file" | sed 's/"rank":0,"name":"a"/"rank":1,"name":"b"/; s/\[0,2/[2,2/')
whole=$(echo "$file" | sed 's/\[0,2,4,4\]/[0,16,16,1]/')
head='{"format":"femtotron checkpoint","version":1,"serial":3,"step":12'
printf '%s' "$head,\"ranks\":2,\"settings\":{\"a\":\"1\",\"b\":\"x\"},\"files\":[$file,$other]," \
    "\"xxh3\":$hex}" >manifest/two
printf '%s' "$head,\"ranks\":1,\"settings\":{},\"files\":[$whole],\"xxh3\":$hex}" >manifest/one

# An index: name, version, dtype, sequences, documents + 1; lengths, pointers, documents.
mm() { # DTYPE BYTES_PER_TOKEN
    printf 'MMIDIDX\0\0'
    bytes 8 1
    bytes 1 "$1"
    bytes 8 3 3
    bytes 4 2 3 4
    bytes 8 0 $((2 * $2)) $((5 * $2))
    bytes 8 0 1 3
}
mm 8 2 >megatron/uint16
mm 4 4 >megatron/int32
{ mm 1 1; bytes 1 0 0 0; } >megatron/modes

printf '\100{"prompt": "a \303\244\\n\\ud83d\\ude00", "answer": "b"}' >jsonl/text
printf '\003{"prompt": [1, 2, 3], "answer": [4]}' >jsonl/ids
